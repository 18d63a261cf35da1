"""Where a fault of the recurrence can show: rules on one batch, and the registration that asks them of every batch of a cell."""

from __future__ import annotations

from collections.abc import Callable

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.harness.faults.fault import Fault, add
from attnmatrix.harness.faults.lightning_subject import LightningSubject

Rule = Callable[[Case], bool]
"""Whether a fault alters what one batch computes or writes."""

EAGER = (RunnerMode.EAGER,)
EXTENDS = (RunnerMode.EAGER, RunnerMode.PCG_EXTEND, RunnerMode.BCG_EXTEND)
DECODES = (RunnerMode.EAGER, RunnerMode.CG_DECODE)
VERIFIES = (RunnerMode.VERIFY, RunnerMode.VERIFY_CG)
GRAPHS = (RunnerMode.CG_DECODE, RunnerMode.VERIFY_CG)
ALL = (*EXTENDS, RunnerMode.CG_DECODE, *VERIFIES)


def plant(
    id: str,
    kind: str,
    title: str,
    diagnosis: str,
    subject: type[LightningSubject],
    alters: Rule,
    modes: tuple[RunnerMode, ...] = ALL,
    source: str = "",
    like: tuple[str, ...] = (),
    also: Callable[[Case, RunnerMode], bool] = lambda case, mode: True,
) -> None:
    """Register a fault of the Lightning subject. It applies to the cells one of whose batches it ``alters``, if ``also`` agrees."""

    def applies(case: Case, mode: RunnerMode) -> bool:
        if case.kind is not AttentionKind.LIGHTNING or mode not in modes or case.forward not in mode.forward_modes:
            return False
        return any(alters(batch) for batch in schedule(case, mode).batches) and also(case, mode)

    add(Fault(id, kind, title, diagnosis, AttentionKind.LIGHTNING, modes, applies, subject, LightningSubject, source, like))


def extends(batch: Case) -> bool:
    """Goes through the extend path."""
    return batch.forward in (ForwardMode.EXTEND, ForwardMode.MIXED) and batch.num_tokens > 0


def decodes(batch: Case) -> bool:
    return batch.forward is ForwardMode.DECODE


def verifies(batch: Case) -> bool:
    return batch.forward is ForwardMode.TARGET_VERIFY


def rows(batch: Case) -> list[tuple[int, int]]:
    """Prefix and new length of each request with a token."""
    return [(prefix, new) for prefix, new in zip(batch.prefix_lens, batch.new_lens, strict=True) if new]


def has_tokens(batch: Case) -> bool:
    return batch.num_tokens > 0


def has_prefix(batch: Case) -> bool:
    """A request with a token starts from a cached state."""
    return any(prefix for prefix, _ in rows(batch))


def extends_prefix(batch: Case) -> bool:
    return extends(batch) and has_prefix(batch)


def has_fresh(batch: Case) -> bool:
    """An extend has a request with a token and without prefix."""
    return extends(batch) and any(not prefix for prefix, _ in rows(batch))


def remembers(batch: Case) -> bool:
    """Some output or state depends on an earlier token or state of its request."""
    return any(prefix or new > 1 for prefix, new in rows(batch))


def is_tree(batch: Case) -> bool:
    return verifies(batch) and any(batch.tree(r) != tuple(range(-1, new - 1)) for r, new in enumerate(batch.new_lens))
