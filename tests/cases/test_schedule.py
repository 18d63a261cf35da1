"""The batches of a cell: eager modes get a second batch, graph modes replays that differ, shrink and grow."""

from __future__ import annotations

from itertools import pairwise

import pytest

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Placement
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import LONG, Schedule, schedule, vary
from attnmatrix.cases.suites import suite

TOKEN_MODES = (RunnerMode.PCG_EXTEND, RunnerMode.BCG_EXTEND)
GRAPHS = [(kind, mode) for kind in AttentionKind for mode in RunnerMode if mode.uses_graph and suite(kind, mode)]
EAGER = [(kind, mode) for kind in AttentionKind for mode in RunnerMode if not mode.uses_graph and suite(kind, mode)]
graph_modes = pytest.mark.parametrize(("kind", "mode"), GRAPHS, ids=lambda member: member.value)


def live(case: Case, mode: RunnerMode) -> int:
    """What is padded: tokens in the piecewise modes, requests elsewhere."""
    return case.num_tokens if mode in TOKEN_MODES else case.batch_size


def replays(plan: Schedule, captured: int) -> list[Case]:
    return [step.case for step in plan.steps if step.padded == captured]


@graph_modes
def test_two_sizes_are_captured_and_interleaved(kind: AttentionKind, mode: RunnerMode) -> None:
    for case in suite(kind, mode):
        plan = schedule(case, mode)
        assert len(set(plan.captures)) == 2, case.id
        assert {step.padded for step in plan.steps} == set(plan.captures), case.id
        for captured in plan.captures:
            turns = [index for index, step in enumerate(plan.steps) if step.padded == captured]
            assert len(turns) >= 3, case.id
            gaps = [set(range(first + 1, last)) - set(turns) for first, last in pairwise(turns)]
            assert all(gaps), f"{case.id}: two replays of {captured} follow each other"


@graph_modes
def test_every_replay_fits_its_capture_and_most_are_padded(kind: AttentionKind, mode: RunnerMode) -> None:
    for case in suite(kind, mode):
        plan = schedule(case, mode)
        room = [step.padded - live(step.case, mode) for step in plan.steps]
        assert min(room) >= 0, case.id
        assert sum(1 for spare in room if spare) >= 3, case.id


@graph_modes
def test_padded_rows_carry_both_fills(kind: AttentionKind, mode: RunnerMode) -> None:
    for case in suite(kind, mode):
        fills = {step.fill for step in schedule(case, mode).steps if step.padded > live(step.case, mode)}
        assert fills == {"production", "stale"}, case.id


@graph_modes
def test_replays_of_one_capture_differ_in_their_lengths(kind: AttentionKind, mode: RunnerMode) -> None:
    for case in suite(kind, mode):
        plan = schedule(case, mode)
        for captured in plan.captures:
            lengths = [(batch.prefix_lens, batch.new_lens) for batch in replays(plan, captured)]
            assert len(set(lengths)) >= 2, case.id


@graph_modes
def test_batches_shrink_and_then_grow(kind: AttentionKind, mode: RunnerMode) -> None:
    for case in suite(kind, mode):
        plan = schedule(case, mode)
        for captured in plan.captures:
            sizes = [batch.batch_size for batch in replays(plan, captured)]
            if case.batch_size == 1 and captured == min(plan.captures):
                assert sizes[-1] > sizes[0], case.id  # one request cannot become fewer
                continue
            low = sizes.index(min(sizes))
            assert sizes[0] > sizes[low] < sizes[-1], f"{case.id}: {sizes}"


@graph_modes
def test_the_case_itself_is_replayed(kind: AttentionKind, mode: RunnerMode) -> None:
    for case in suite(kind, mode):
        assert case in schedule(case, mode).batches


@graph_modes
def test_graph_modes_use_pages_in_no_order(kind: AttentionKind, mode: RunnerMode) -> None:
    for case in suite(kind, mode):
        assert {batch.placement for batch in schedule(case, mode).batches} == {case.placement}, case.id
        assert case.placement in (Placement.SHUFFLED, Placement.SHARED)


@pytest.mark.parametrize(("kind", "mode"), EAGER, ids=lambda member: member.value)
def test_eager_modes_prepare_a_second_batch(kind: AttentionKind, mode: RunnerMode) -> None:
    for case in suite(kind, mode):
        plan = schedule(case, mode)
        assert (plan.captures, plan.batches[0]) == ((), case.but(story=""))
        assert len(plan.batches) >= 2
        assert plan.batches[1] != case


@pytest.mark.parametrize("kind", AttentionKind)
@pytest.mark.parametrize(
    "mode",
    [mode for mode in RunnerMode if suite(AttentionKind.SOFTMAX, mode) and mode is not RunnerMode.HANDOFF],  # goes on, derives nothing
    ids=lambda mode: mode.value,
)
def test_derived_batches_keep_the_options_and_both_prefix_paths(mode: RunnerMode, kind: AttentionKind) -> None:
    for case in (case for case in suite(kind, mode) if not case.story):
        for batch in schedule(case, mode).batches:
            kept = {"prefix_lens": (), "new_lens": (), "track_lens": (), "seed": 0, "trees": (), "forward": ForwardMode.EXTEND}
            assert batch.but(**kept) == case.but(**kept), batch.id
            assert batch.forward is case.forward
            assert {bool(prefix) for prefix in batch.prefix_lens} <= {bool(prefix) for prefix in case.prefix_lens}


def test_the_schedule_depends_on_the_content_alone() -> None:
    case = suite(AttentionKind.SOFTMAX, RunnerMode.CG_DECODE)[0]
    assert schedule(case, RunnerMode.CG_DECODE) == schedule(case.but(name="renamed"), RunnerMode.CG_DECODE)


def test_a_derived_tree_belongs_to_the_request_it_came_from() -> None:
    case = next(case for case in suite(AttentionKind.SOFTMAX, RunnerMode.VERIFY) if len(case.trees) > 1)
    for salt in range(1, 9):
        batch = vary(case, 5, salt)
        assert {(len(tree), tree) for tree in batch.trees} <= {(len(tree), tree) for tree in case.trees}
        assert batch.new_lens == tuple(len(tree) for tree in batch.trees)


def test_derived_batches_of_long_contexts_are_short() -> None:
    case = next(c for c in suite(AttentionKind.SOFTMAX, RunnerMode.EAGER) if c.name == "context4000_decode")
    for salt in range(1, 9):
        assert max(vary(case, 4, salt).prefix_lens) <= LONG + 64
