"""Which cases are tried in which runner mode: the same for every row of a kind."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from attnmatrix.cases import layouts, speculative
from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode

SUPPORTED_MODES = tuple(RunnerMode)


@cache
def suite(kind: AttentionKind, mode: RunnerMode) -> tuple[Case, ...]:
    """All cases of one kind for one runner mode, each id once; the named variant of a case comes first."""
    unique: dict[str, Case] = {}
    for case in _candidates(kind, mode):
        if case.forward in mode.forward_modes:
            unique.setdefault(case.id, case)
    return tuple(unique.values())


def modes_of(case: Case) -> tuple[RunnerMode, ...]:
    """The runner modes that can drive a case."""
    return tuple(mode for mode in RunnerMode if case.forward in mode.forward_modes)


def _candidates(kind: AttentionKind, mode: RunnerMode) -> Iterable[Case]:
    softmax = kind is AttentionKind.SOFTMAX
    if mode in (RunnerMode.VERIFY, RunnerMode.VERIFY_CG):
        yield from speculative.verify_chains(kind)
        yield from speculative.verify_trees(kind)
        if softmax:
            yield from speculative.verify_windows()
        return
    if mode in (RunnerMode.DE, RunnerMode.DE_CG, RunnerMode.DE_V2_CG, RunnerMode.EAGLE_DE, RunnerMode.EAGLE_DRAFT, RunnerMode.FKVMTP):
        return
    if mode is RunnerMode.EAGER:
        yield from layouts.placement_variants(kind)
    else:
        yield from layouts.seed_layouts(kind)
    yield from layouts.mixed_batches(kind)
    yield from layouts.uniform_extends(kind)
    yield from layouts.page_size_sweep(kind)
    yield from layouts.head_geometries(kind)
    yield from layouts.precision_variants(kind)
    yield from layouts.long_contexts(kind)
    if softmax:
        for window in (4, 16):
            yield from layouts.window_edges(window)
        yield from layouts.score_options()
    else:
        yield from layouts.state_variants()


def is_graph_replayable(case: Case) -> bool:
    """Graph modes need at least one request with a new token to capture."""
    return case.forward is not ForwardMode.IDLE and case.num_tokens > 0
