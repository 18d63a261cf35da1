"""What a row claims, and the conventions it follows. Claims are checked by running."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Union

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule


@dataclass(frozen=True)
class Supported:
    """The mode is claimed to work."""


@dataclass(frozen=True)
class Blocked:
    """The package refuses: it must raise ``exception`` (a class name, e.g. ``ValueError``) whose text matches ``match``
    (a regular expression) and touch no pool. Computing instead is an error of the declaration."""

    reason: str
    exception: str
    match: str
    issue: str | None = None


@dataclass(frozen=True)
class Deferred:
    """Not supported yet: it raises, or computes wrong values. Passing is an error of the declaration.

    ``issue`` is where the work is tracked and must not be empty.
    """

    reason: str
    issue: str

    def __post_init__(self) -> None:
        if not self.issue:
            raise ValueError("a deferral needs an issue")


@dataclass(frozen=True)
class NotApplicable:
    """The mode has no meaning here; ``check`` returns True where a machine can see the cause (such as an argument absent
    from the package's signature)."""

    reason: str
    check: Callable[[], bool]


Claim = Union[Supported, Blocked, Deferred, NotApplicable]


@dataclass(frozen=True)
class KnownFault:
    """A fault found in the package. ``finding`` names the reproduction under ``matrix/findings/``, ``diagnosis`` what the
    harness must say of the failure, or ``raises: `` and part of what an exception says. A cell one of whose batches it ``applies`` to must
    fail, with that diagnosis."""

    applies: Callable[[Case, RunnerMode], bool]
    finding: str
    diagnosis: str
    reason: str


def always(case: Case, device: str) -> bool:
    """On every case and device."""
    return True


@dataclass(frozen=True)
class RoundingStep:
    """A rounding that a kernel performs beyond the textbook sequence. No number: ``name`` selects a model of it in
    ``harness/rounding.py``, ``citation`` is the kernel's line, ``applies(case, device type)`` says which batches meet it."""

    name: str
    citation: str
    applies: Callable[[Case, str], bool] = always


@dataclass(frozen=True)
class Conventions:
    """How this package's interface differs from the contract; the harness translates.

    ``kv_layout``: NHD ``[pages, page, H, D]``, HND ``[pages, H, page, D]`` or ``interleaved`` ``[pages, 2, page, H, D]``.
    ``state_layout``: KV ``[slots, H, K, V]`` or VK. ``output``: ``per_head`` or ``flat`` ``[T, H * D]``. ``window``:
    ``inclusive`` counts the query's own key, ``exclusive`` the keys before it. ``lse_base``: ``e`` or ``2``.
    ``tail_may_hold_nan``, ``unreferenced_may_hold_nan``, ``padding_may_hold_nan``, ``window_may_hold_nan``: whether dead slots of a last
    page, pages of no request, the targets of table entries past a request's last page, and pages that its window has left behind may
    hold NaN.
    """

    kv_layout: str = "NHD"
    state_layout: str = "KV"
    output: str = "per_head"
    window: str = "inclusive"
    lse_base: str = "e"
    tail_may_hold_nan: bool = True
    unreferenced_may_hold_nan: bool = True
    padding_may_hold_nan: bool = True
    window_may_hold_nan: bool = True
    rounding: tuple[RoundingStep, ...] = ()

    def rounding_of(self, case: Case, device: str) -> frozenset[str]:
        """Names of the rounding steps that a batch meets on a device type."""
        return frozenset(step.name for step in self.rounding if step.applies(case, device))

    def __post_init__(self) -> None:
        allowed = {
            "kv_layout": ("NHD", "HND", "interleaved"),
            "state_layout": ("KV", "VK"),
            "output": ("per_head", "flat"),
            "window": ("inclusive", "exclusive"),
            "lse_base": ("e", "2"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is one of {', '.join(values)}, got {getattr(self, name)!r}")


class Claims(Protocol):
    """What a row, or a pair of rows, claims about each cell."""

    @property
    def deterministic(self) -> bool:
        """Whether equal inputs give equal bits."""
        ...

    @property
    def batch_invariant(self) -> bool:
        """Whether a request's result does not depend on its neighbours, to the bit."""
        ...

    def claim(self, mode: RunnerMode, case: Case, device: str) -> Claim: ...

    def known_fault(self, mode: RunnerMode, case: Case) -> KnownFault | None: ...

    def fault_of(self, mode: RunnerMode, batch: Case) -> KnownFault | None: ...


def no_limits(case: Case) -> None:
    """Every case is taken."""


@dataclass(frozen=True)
class Capabilities:
    """A row's claims: per runner mode (unlisted: supported), per case, and the faults found.

    ``why_not`` gives the package's limits: :class:`Blocked` where it refuses, :class:`NotApplicable` where its signature has
    no argument for what the case asks. ``interpreter_limits`` are those of Triton's interpreter, met on a CPU only, which
    say nothing about the package; ``compiler_limits`` are met only where kernels are compiled, on a GPU.
    """

    modes: Mapping[RunnerMode, Claim] = field(default_factory=dict)
    why_not: Callable[[Case], Claim | None] = no_limits
    interpreter_limits: Callable[[Case], Blocked | None] = no_limits
    compiler_limits: Callable[[Case], Blocked | None] = no_limits
    known_faults: tuple[KnownFault, ...] = ()
    deterministic: bool = True
    batch_invariant: bool = False

    def claim(self, mode: RunnerMode, case: Case, device: str) -> Claim:
        """The claim for one cell on a ``device`` type: the mode's, narrowed by the package's limits and the interpreter's."""
        claim = self.modes.get(mode, Supported())
        for batch in claimed_batches(mode, case):
            if isinstance(claim, Supported):
                claim = self.why_not(batch) or claim
            if isinstance(claim, Supported):
                limits = self.interpreter_limits if device == "cpu" else self.compiler_limits
                claim = limits(batch) or claim
        return claim

    def known_fault(self, mode: RunnerMode, case: Case) -> KnownFault | None:
        """The first fault that applies to the case or to a batch derived from it."""
        batches = (case, *schedule(case, mode).batches)
        return next((found for batch in batches if (found := self.fault_of(mode, batch)) is not None), None)

    def fault_of(self, mode: RunnerMode, batch: Case) -> KnownFault | None:
        """The first fault that applies to one batch."""
        return next((fault for fault in self.known_faults if fault.applies(batch, mode)), None)


def claimed_batches(mode: RunnerMode, case: Case) -> tuple[Case, ...]:
    """The batches whose limits are the cell's: the case, and where its requests go on, every step."""
    plan = schedule(case, mode) if mode is RunnerMode.HANDOFF else None
    return plan.batches if plan is not None else (case,)
