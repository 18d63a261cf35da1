"""Which cases are tried in which runner mode: the same for every row of a kind."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from attnmatrix.cases import combinations, crossings, layouts, quantised, speculative, state_stories, thresholds
from attnmatrix.cases.case import AttentionKind, Case, Scratch
from attnmatrix.cases.modes import RunnerMode

SUPPORTED_MODES = tuple(RunnerMode)


@cache
def suite(kind: AttentionKind, mode: RunnerMode) -> tuple[Case, ...]:
    """All cases of one kind for one runner mode, each id once; the named variant of a case comes first."""
    unique: dict[str, Case] = {}
    for case in _candidates(kind, mode):
        if drives(mode, case):
            unique.setdefault(case.id, case)
    return tuple(unique.values())


@cache
def gpu_suite(kind: AttentionKind, mode: RunnerMode) -> tuple[Case, ...]:
    """:func:`suite` and the cases that want a GPU's memory and speed."""
    more = (*layouts.huge_pools(), *layouts.longest_contexts()) if (kind, mode) == (AttentionKind.SOFTMAX, RunnerMode.EAGER) else ()
    return (*suite(kind, mode), *more)


def modes_of(case: Case) -> tuple[RunnerMode, ...]:
    """The runner modes that can drive a case."""
    return tuple(mode for mode in RunnerMode if drives(mode, case))


def drives(mode: RunnerMode, case: Case) -> bool:
    """Whether a runner mode can drive a case. Stories run without graphs. A graph needs a token to capture and a scratch page for padding,
    a verify graph the same number of draft tokens in every request."""
    if case.forward not in mode.forward_modes:
        return False
    uniform = mode is not RunnerMode.VERIFY_CG or len(set(case.new_lens)) == 1
    return not mode.uses_graph or (not case.story and case.num_tokens > 0 and case.scratch is not Scratch.NONE and uniform)


def _candidates(kind: AttentionKind, mode: RunnerMode) -> Iterable[Case]:
    softmax = kind is AttentionKind.SOFTMAX
    if mode in (RunnerMode.VERIFY, RunnerMode.VERIFY_CG):
        yield from speculative.verify_chains(kind)
        yield from speculative.verify_trees(kind)
        if softmax:
            yield from speculative.verify_windows()
            yield from speculative.verify_options()
            yield from quantised.fp8_verifies()
            yield from combinations.verify_extremes()
            yield from thresholds.verify_options()
            yield from crossings.drafts()
        else:
            yield from state_stories.verify_branches()
            yield from state_stories.verify_stories()
        if mode is RunnerMode.VERIFY:
            yield from combinations.verify_combinations(kind)
        return
    if mode is RunnerMode.HANDOFF:
        yield from layouts.conversations(kind)
        if softmax:
            yield from quantised.fp8_conversations()
        return
    if mode in (RunnerMode.DE, RunnerMode.DE_CG, RunnerMode.DE_V2_CG, RunnerMode.EAGLE_DE, RunnerMode.EAGLE_DRAFT, RunnerMode.FKVMTP):
        return
    if mode is RunnerMode.EAGER:
        yield from layouts.placement_variants(kind)
    else:
        yield from layouts.seed_layouts(kind)
    yield from layouts.mixed_batches(kind)
    yield from layouts.uniform_extends(kind)
    if softmax or mode is RunnerMode.EAGER:  # a state pool has no pages
        yield from layouts.page_size_sweep(kind)
    yield from layouts.head_geometries(kind)
    yield from layouts.precision_variants(kind)
    yield from layouts.long_contexts(kind)
    if softmax:
        for window in (4, 16):
            yield from layouts.window_edges(window)
        yield from layouts.score_options()
        if mode is RunnerMode.EAGER:
            yield from layouts.large_shapes()
            yield from layouts.long_series(kind)
            yield from combinations.extremes()
            yield from thresholds.lengths_and_windows()
            yield from thresholds.chunks()
            yield from thresholds.long_contexts()
            yield from thresholds.counts()
            yield from thresholds.loudest()
            yield from crossings.beyond_a_split()
            yield from crossings.heads_and_pages()
            yield from combinations.shared_prefixes()
        if mode in (RunnerMode.EAGER, RunnerMode.CG_DECODE):
            yield from combinations.captured_options()
            yield from thresholds.captured()
            yield from crossings.captured()
        yield from layouts.page256_variants()
        yield from quantised.fp8_batches()
    else:
        yield from layouts.state_variants()
        yield from state_stories.snapshots()
        if mode is RunnerMode.EAGER:
            yield from state_stories.kernel_branches()
            yield from state_stories.extend_stories()
            yield from layouts.long_series(kind)
    if mode is RunnerMode.EAGER:
        yield from combinations.extend_combinations(kind)
        yield from combinations.decode_combinations(kind)
