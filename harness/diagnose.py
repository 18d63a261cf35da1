"""Diagnosis: which planted fault, put into a working row, produces what a failing row produced.

It sees the case and the failing trial's results only. Each applicable fault is run in the same world and mode; layers after the first
get the failing row's own inputs, so that one rounding more or less does not grow from layer to layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.faults.fault import Fault, faults
from attnmatrix.harness.faults.softmax_subject import SPLIT
from attnmatrix.harness.matching import SLACK, Search, wrong_quantities
from attnmatrix.harness.registry import Row
from attnmatrix.harness.scratch import OutOfBoundsWrite
from attnmatrix.harness.trial import Trial

ALIKE = 0.1
"""Faults whose distances from the failing row differ by less than this share of the limit are not told apart."""
EXPLAINED = 0.5
"""A fault explains a result that is nearer to the fault's than this share of its own distance from the right one: a result barely over its
limit is near every fault that barely differs from the right one, too."""
LONGEST = 20.0
"""Estimated seconds (see ``_seconds``) above which a case is not diagnosed."""
UNEXPLAINED = "unexplained"
UNDEFINED = "undefined"
"""Declared where a kernel reads or leaves memory that nothing wrote: its output is no function of its inputs, so no fault can be named."""
RAISES, RAISED = "raises: ", "no diagnosis: the run ended in an exception,"
OUT_OF_BOUNDS = "no diagnosis: a write out of bounds ended the run"
CONTINUED = "no diagnosis: later steps go on with what a wrong one left"
TOO_LARGE = "no diagnosis: the case is too large to try every fault on it"


@dataclass(frozen=True)
class Diagnosis:
    """``faults`` that the case cannot tell apart and whose results equal the failing row's, ``error`` apart at most; none: ``why``.

    ``subject`` is what is wrong (output, state, intermediate state, lse or write); ``nearest`` is the closest of the other faults,
    ``distance`` limits away.
    """

    faults: tuple[Fault, ...] = ()
    error: float = 0.0
    subject: str = "output"
    nearest: Fault | None = None
    distance: float = float("inf")
    why: str = ""

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(fault.id for fault in self.faults)

    @property
    def skipped(self) -> bool:
        """Whether there was nothing to compare: the case is too large, a write out of bounds ended the run, or steps build on each
        other."""
        return self.why in (TOO_LARGE, OUT_OF_BOUNDS, CONTINUED)

    def confirms(self, declared: str) -> bool:
        """Whether a declared diagnosis is what was found: a fault's id or sentence, ``unexplained``, ``undefined`` (an output that is
        wrong, whatever it resembles) or ``raises: `` and part of the exception's text."""
        if declared == UNDEFINED:
            return self.subject == "output" and (bool(self.faults) or self.why.startswith(UNEXPLAINED))
        if declared.startswith(RAISES):
            return self.why.startswith(RAISED) and declared.removeprefix(RAISES) in self.why
        if not self.faults:
            return declared == UNEXPLAINED and self.why.startswith(UNEXPLAINED)
        return any(declared in (fault.id, fault.diagnosis) for fault in self.faults)

    def __str__(self) -> str:
        if not self.faults:
            return self.why + self._other()
        named = " or ".join(f"{fault.diagnosis} ({fault.id})" for fault in self.faults[:3])
        more = f" or {', '.join(self.ids[3:])}" if self.ids[3:] else ""
        return f"{self.subject} equals the reference with {named}{more}, error {self.error:.2g}{self._other()}"

    def _other(self) -> str:
        if self.nearest is None:
            return ""
        return f"; nearest other: {self.nearest.diagnosis} ({self.nearest.id}), {self.distance:.3g} limits away"


def diagnose(row: Row, mode: RunnerMode, case: Case, device: torch.device, trial: Trial) -> Diagnosis:
    """What explains a failing ``trial``. The faults tried are those of the row's kind that apply to the case in this mode."""
    if isinstance(trial.error, OutOfBoundsWrite):
        return Diagnosis(why=OUT_OF_BOUNDS)
    if trial.error is not None:
        return Diagnosis(why=f"{RAISED} {_chain(trial.error)}")
    if not trial.outputs:
        return Diagnosis(why="no diagnosis: nothing was run")
    if mode is RunnerMode.HANDOFF:
        return Diagnosis(why=CONTINUED)
    if any(len(outputs) != len(trial.outputs[0]) for outputs in trial.outputs):
        return Diagnosis(why="no diagnosis: attention did not run once for each layer")
    candidates = candidates_for(row, mode, case)
    if len(candidates) * _seconds(case, mode) > LONGEST:
        return Diagnosis(why=TOO_LARGE)
    search = Search(row, mode, case, device, trial)
    fits = search.fits(candidates)
    most = min(1.0, EXPLAINED * search.off / SLACK) if search.off > 1 else 1.0
    close = [replace(fit, guards=search.same_guards(fit.fault)) for fit in fits if fit.ratio <= most and search.fails(fit.fault)]
    wrong = _wrong(trial)
    close = [fit for fit in close if wrong or fit.guards < 2]
    best = min((fit.guards for fit in close), default=2)
    close = sorted((fit for fit in close if fit.guards == best), key=lambda fit: (fit.ratio, fit.fault.id))
    told = [fit for fit in close if fit.ratio <= close[0].ratio + ALIKE]
    others = sorted((fit for fit in fits if fit.fault not in [f.fault for f in told]), key=lambda fit: fit.ratio)
    nearest = next((fit for fit in others if 0 < fit.ratio < float("inf")), None)
    other = {"nearest": nearest.fault if nearest else None, "distance": nearest.ratio * SLACK if nearest else float("inf")}
    subject = next((name for name in ("output", "state", "intermediate state", "lse") if name in wrong), "write")
    if not told:
        why = f"{UNEXPLAINED}: none of {len(candidates)} faults produces the same"
        return Diagnosis(subject=subject, why=why, **other)  # type: ignore[arg-type]
    return Diagnosis(tuple(fit.fault for fit in told), max(fit.error for fit in told), subject, **other)  # type: ignore[arg-type]


def candidates_for(row: Row, mode: RunnerMode, case: Case) -> list[Fault]:
    """The faults to try: those of the row's kind that apply to the case in this mode. One that is about a layout of the pool is tried on that
    layout alone: on another its indices may lie outside the pool, which on a GPU ends the process."""
    layouts = (Conventions().kv_layout, row.conventions.kv_layout)
    return [f for f in faults() if f.attention is row.kind and f.conventions.kv_layout in layouts and f.applies(case, mode)]


def _chain(error: BaseException) -> str:
    """The exception and those that caused it, in one line."""
    told: list[str] = []
    current: BaseException | None = error
    while current is not None and len(told) < 8:
        told.append(f"{type(current).__name__}: {current}")
        current = current.__cause__ or current.__context__
    return " ".join(" from ".join(told).split())


def _seconds(case: Case, mode: RunnerMode) -> float:
    """About how long one fault takes on one core: by batch, by step of the subjects' loops over keys, by multiplication, and by element
    of an enlarged pool. From sizes
    alone, so that a record does not depend on the machine."""
    batches = schedule(case, mode).batches
    linear = case.kind is not AttentionKind.SOFTMAX
    tokens = [batch.batch_size * max([1, *batch.new_lens]) for batch in batches]
    lengths = [case.heads.dim if linear else max([1, *batch.kv_lens]) for batch in batches]
    products = sum(count * length for count, length in zip(tokens, lengths, strict=True)) * case.heads.q * case.heads.dim
    loops = sum(max([1, *(batch.new_lens if linear else batch.kv_lens)]) // SPLIT for batch in batches)
    filled = case.spare_pages * case.page_size * case.heads.kv * case.heads.dim
    return len(batches) * (5e-3 if mode.uses_graph else 1.5e-3) + loops * 8e-5 + products * 2e-9 + filled * 2e-9


def _wrong(trial: Trial) -> set[str]:
    """Names of the quantities with a row over its limit."""
    names = {"out": "output", "intermediate": "intermediate state"}
    return {names.get(quantity, quantity) for quantity in wrong_quantities(trial)}
