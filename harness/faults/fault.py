"""What a fault is: a working row with one change of semantics, and where that change can show."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.capabilities import Capabilities, Conventions
from attnmatrix.harness.context import Context
from attnmatrix.harness.registry import Row

Subject = Callable[[Context], AttentionBackend]


@dataclass(frozen=True)
class Fault:
    """One fault. ``subject`` builds the faulty backend, ``healthy`` the same backend with the change switched off.

    ``applies`` says on which cases the change alters what is computed or written; decided from case and mode alone. ``diagnosis``
    completes the sentence "output equals the reference with ...". ``source`` is a public report of the fault, if there is one.
    ``like`` names faults that no output can tell from this one on some cases.
    """

    id: str
    kind: str
    title: str
    diagnosis: str
    attention: AttentionKind
    modes: tuple[RunnerMode, ...]
    applies: Callable[[Case, RunnerMode], bool]
    subject: Subject
    healthy: Subject
    source: str = ""
    like: tuple[str, ...] = ()
    conventions: Conventions = field(default_factory=Conventions)
    batch_invariant: bool = False

    def row(self, enabled: bool = True) -> Row:
        """The row that carries the fault, or its healthy twin."""
        create = self.subject if enabled else self.healthy
        return Row(
            name=f"fault-{self.id}",
            kind=self.attention,
            create=create,
            capabilities=Capabilities(batch_invariant=self.batch_invariant),
            conventions=self.conventions,
            source=__file__,
        )


@dataclass(frozen=True)
class NotInjected:
    """A listed fault that is not run. ``status`` is ``pending`` (``reason`` says what it waits for), ``equivalent`` (why no output, pool
    or metadata can differ) or ``out of scope``."""

    id: str
    kind: str
    title: str
    status: str
    reason: str


_FAULTS: dict[str, Fault] = {}
_NOT_INJECTED: dict[str, NotInjected] = {}


def add(entry: Fault | NotInjected) -> None:
    """Register a fault. Raises ValueError when its id is taken."""
    if entry.id in _FAULTS or entry.id in _NOT_INJECTED:
        raise ValueError(f"fault {entry.id!r} is registered twice")
    if isinstance(entry, Fault):
        _FAULTS[entry.id] = entry
    else:
        _NOT_INJECTED[entry.id] = entry


@lru_cache(maxsize=1)
def _load() -> None:
    package = importlib.import_module("attnmatrix.harness.faults")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def faults() -> tuple[Fault, ...]:
    """All faults that can be injected, by id."""
    _load()
    return tuple(_FAULTS[key] for key in sorted(_FAULTS))


def not_injected() -> tuple[NotInjected, ...]:
    """All listed faults that are not run, by id."""
    _load()
    return tuple(_NOT_INJECTED[key] for key in sorted(_NOT_INJECTED))
