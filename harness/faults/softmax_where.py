"""Where a fault of the softmax row can show: rules on one batch, and the registration that asks them of every batch of a cell."""

from __future__ import annotations

from collections.abc import Callable

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.placement import PoolPlan, plan_pool
from attnmatrix.cases.schedule import schedule
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.faults.fault import Fault, NotInjected, add
from attnmatrix.harness.faults.listed import BY_ID
from attnmatrix.harness.faults.softmax_subject import SPLIT, SoftmaxSubject
from attnmatrix.harness.probes import PEAKED

Rule = Callable[[Case], bool]
"""Whether a fault alters what one batch computes, writes or prepares."""

EAGER = (RunnerMode.EAGER,)
VERIFY = (RunnerMode.VERIFY, RunnerMode.VERIFY_CG)
PIECEWISE = (RunnerMode.PCG_EXTEND, RunnerMode.BCG_EXTEND)
EXTEND = (RunnerMode.EAGER, *PIECEWISE)
DECODE = (RunnerMode.EAGER, RunnerMode.CG_DECODE)
PLAIN = (RunnerMode.EAGER, RunnerMode.CG_DECODE, *PIECEWISE)
UNPADDED = (*EXTEND, RunnerMode.VERIFY)
"""Modes in which the last token of a batch is a live one."""
ALL = (*PLAIN, *VERIFY)


def plant(
    id: str,
    diagnosis: str,
    subject: type[SoftmaxSubject],
    alters: Rule,
    modes: tuple[RunnerMode, ...] = ALL,
    *,
    kind: str = "",
    title: str = "",
    source: str = "",
    like: tuple[str, ...] = (),
    also: Callable[[Case, RunnerMode], bool] = lambda case, mode: True,
    healthy: type[SoftmaxSubject] = SoftmaxSubject,
    conventions: Conventions | None = None,
    batch_invariant: bool = False,
) -> None:
    """Register a fault of the softmax subject; kind, title and source of a listed one are those of the list.

    It applies to the cells one of whose batches it ``alters``, if ``also`` agrees.
    """

    def applies(case: Case, mode: RunnerMode) -> bool:
        if case.kind is not AttentionKind.SOFTMAX or mode not in modes or case.forward not in mode.forward_modes:
            return False
        return any(batch.num_tokens and alters(batch) for batch in schedule(case, mode).batches) and also(case, mode)

    if id in BY_ID:
        kind, title, source = BY_ID[id].kind, BY_ID[id].title, BY_ID[id].source
    others = tuple(other for other in like if other != id)
    add(
        Fault(
            id,
            kind,
            title,
            diagnosis,
            AttentionKind.SOFTMAX,
            modes,
            applies,
            subject,
            healthy,
            source,
            others,
            conventions=conventions or Conventions(),
            batch_invariant=batch_invariant,
        )
    )


def put_off(id: str, status: str, reason: str) -> None:
    """Register a listed fault that is not run (see :class:`NotInjected`)."""
    add(NotInjected(id, BY_ID[id].kind, BY_ID[id].title, status, reason))


def always(case: Case) -> bool:
    return True


def decodes(case: Case) -> bool:
    return case.forward is ForwardMode.DECODE


def extends(case: Case) -> bool:
    """Goes through the extend path."""
    return case.forward in (ForwardMode.EXTEND, ForwardMode.MIXED)


def requests(case: Case) -> list[tuple[int, int]]:
    """Prefix and new length of each request with a token."""
    return [(prefix, new) for prefix, new in zip(case.prefix_lens, case.new_lens, strict=True) if new]


def has_prefix(case: Case) -> bool:
    return any(prefix for prefix, _ in requests(case))


def several_tokens(case: Case) -> bool:
    """A request with more than one new token."""
    return any(new > 1 for _, new in requests(case))


def several_requests(case: Case) -> bool:
    return case.batch_size > 1


def crosses_pages(case: Case) -> bool:
    return max(case.kv_lens, default=0) > case.page_size


def ragged(case: Case) -> bool:
    """Requests with different total lengths."""
    return len(set(case.kv_lens)) > 1


def uneven(case: Case) -> bool:
    """Requests with different numbers of new tokens."""
    return len(set(case.new_lens)) > 1


def splits(case: Case) -> bool:
    """A token whose keys span more than one split."""
    return max(case.kv_lens, default=0) > SPLIT


def beyond_window(case: Case) -> bool:
    """A request longer than the window."""
    return case.window is not None and any(prefix + new > case.window for prefix, new in requests(case))


def branches(case: Case) -> bool:
    """A draft tree that is not a chain."""
    return any(case.tree(request) != tuple(range(-1, new - 1)) for request, new in enumerate(case.new_lens))


def layout(case: Case, mode: RunnerMode) -> PoolPlan:
    """The pool of a cell under the peaked probe."""
    return plan_pool(schedule(case, mode, PEAKED.recycled).owners)


def used_pages(case: Case, mode: RunnerMode) -> set[int]:
    """Physical pages of any request of a cell."""
    return {page for table in layout(case, mode).tables for page in table}
