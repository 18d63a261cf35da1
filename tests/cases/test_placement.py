"""Where pages lie: each placement is what its name says, and nobody's page is somebody else's."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads, Placement, Scratch
from attnmatrix.cases.layouts import seed_layouts
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.placement import PoolPlan, plan_pool, shared_prefix_len, with_placements
from attnmatrix.cases.schedule import schedule
from attnmatrix.cases.suites import suite

RAGGED = Case(ForwardMode.EXTEND, 16, (48, 40, 70), (5, 30, 1), Heads(4, 2, 128))
TOKENS = RAGGED.but(page_size=1, prefix_lens=(9, 4, 6), new_lens=(5, 6, 1))


def plan(case: Case, placement: Placement) -> PoolPlan:
    return plan_pool([case.but(placement=placement)])


def check_ownership(pool: PoolPlan, batches: tuple[Case, ...]) -> None:
    """Tables cover every request; first and last page live; spare pages unowned; sharing only of common prefixes."""
    lens = [length for batch in batches for length in batch.kv_lens]
    assert [len(table) for table in pool.tables] == [-(-length // pool.page_size) for length in lens]
    owned = {page for table in pool.tables for page in table}
    usable = set(range(pool.num_pages)) - {pool.scratch_page}
    assert owned <= usable, "a request owns the scratch page or one outside the pool"
    if len(owned) > 1:
        assert {min(usable), max(usable)} <= owned, "first and last page belong to requests"
    spare = usable - owned
    assert not spare if batches[0].placement is Placement.CONTIGUOUS else len(spare) >= 2
    start = 0
    owners: dict[int, tuple[int, int]] = {}
    for index, batch in enumerate(batches):
        common = shared_prefix_len(batch) // batch.page_size
        for request in range(batch.batch_size):
            table = pool.tables[start + request]
            assert len(set(table)) == len(table), "a request uses one page twice"
            for logical, page in enumerate(table):
                shared = owners.get(page) == (index, logical) and logical < common
                assert page not in owners or shared, f"page {page} has two owners"
                owners[page] = (index, logical)
        start += batch.batch_size


@pytest.mark.parametrize("kind", AttentionKind)
@pytest.mark.parametrize("mode", [mode for mode in RunnerMode if suite(AttentionKind.SOFTMAX, mode)])
def test_ownership_in_every_world(mode: RunnerMode, kind: AttentionKind) -> None:
    for case in suite(kind, mode):
        batches = schedule(case, mode).batches
        check_ownership(plan_pool(batches), batches)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Case, ...]:
    page, placement = draw(st.sampled_from([1, 2, 16])), draw(st.sampled_from(Placement))
    scratch = draw(st.sampled_from(Scratch))
    requests = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 20)), max_size=5)
    return tuple(
        RAGGED.but(
            page_size=page,
            placement=placement,
            scratch=scratch,
            prefix_lens=tuple(prefix for prefix, _ in drawn),
            new_lens=tuple(new for _, new in drawn),
            seed=index,
        )
        for index, drawn in enumerate(draw(st.lists(requests, min_size=1, max_size=3)))
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(batches())
def test_ownership_of_any_batches(drawn: tuple[Case, ...]) -> None:
    check_ownership(plan_pool(drawn), drawn)


def test_contiguous_is_in_order_without_gaps() -> None:
    tables = plan(RAGGED, Placement.CONTIGUOUS).tables
    assert [page for table in tables for page in table] == list(range(sum(len(t) for t in tables)))


def test_shuffled_leaves_no_request_in_order() -> None:
    tables = plan(RAGGED, Placement.SHUFFLED).tables
    assert [page for table in tables for page in table] != sorted(page for table in tables for page in table)
    assert any(later < earlier for table in tables for earlier, later in pairwise(table))


def test_interleaved_alternates_requests() -> None:
    tables = plan(RAGGED, Placement.INTERLEAVED).tables
    owner = {page: request for request, table in enumerate(tables) for page in table}
    in_order = [owner[page] for page in sorted(owner)]
    shortest = min(len(table) for table in tables)
    assert in_order[: 3 * shortest] == [0, 1, 2] * shortest
    assert all(list(table) == sorted(table) for table in tables)


def test_scattered_at_page_size_1_moves_the_new_tokens_only() -> None:
    tables = plan(TOKENS, Placement.SCATTERED).tables
    for table, prefix, new in zip(tables, TOKENS.prefix_lens, TOKENS.new_lens, strict=True):
        assert list(table[:prefix]) == sorted(table[:prefix])
        assert new == 1 or list(table[prefix:]) != sorted(table[prefix:])


def test_scattered_at_larger_pages_reverses_the_page_order() -> None:
    for table in plan(RAGGED, Placement.SCATTERED).tables:
        assert list(table) == sorted(table, reverse=True)


def test_shared_requests_hold_the_common_prefix_once() -> None:
    case = RAGGED.but(placement=Placement.SHARED, prefix_lens=(48, 40, 70, 0, 15), new_lens=(5, 30, 1, 20, 3))
    tables = plan_pool([case]).tables
    assert shared_prefix_len(case) == 32
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    rest = [*tables[0][2:], *tables[1][2:], *tables[2][2:], *tables[3], *tables[4]]
    assert len(set(rest)) == len(rest)
    assert not set(rest) & set(tables[0][:2])


def test_slots_of_different_requests_meet_in_the_shared_prefix_only() -> None:
    case = RAGGED.but(placement=Placement.SHARED)
    pool, common = plan_pool([case]), shared_prefix_len(case)
    slots = [{pool.slot(r, position): position for position in range(n)} for r, n in enumerate(case.kv_lens)]
    for one in range(3):
        for other in range(one):
            both = slots[one].keys() & slots[other].keys()
            assert {slots[one][slot] for slot in both} == {slots[other][slot] for slot in both} == set(range(common))


def test_nothing_is_shared_across_batches() -> None:
    case = RAGGED.but(placement=Placement.SHARED)
    tables = plan_pool([case, case.but(seed=1)]).tables
    assert not {p for t in tables[:3] for p in t} & {p for t in tables[3:] for p in t}


@pytest.mark.parametrize(("scratch", "page"), [(Scratch.FIRST, 0), (Scratch.NONE, None)])
def test_scratch_page(scratch: Scratch, page: int | None) -> None:
    pool = plan_pool([RAGGED.but(scratch=scratch)])
    assert pool.scratch_page == page
    assert plan_pool([RAGGED]).scratch_page == plan_pool([RAGGED]).num_pages - 1


@pytest.mark.parametrize("kind", AttentionKind)
def test_a_placement_that_repeats_a_table_is_not_generated(kind: AttentionKind) -> None:
    for case in (*seed_layouts(kind), RAGGED, TOKENS):
        ranks = []
        for variant in with_placements(case):
            pool = plan_pool([variant])
            order = sorted({page for table in pool.tables for page in table})
            ranks.append(tuple(tuple(order.index(page) for page in table) for table in pool.tables))
        assert len(set(ranks)) == len(ranks), case.id


def test_with_placements_keeps_the_case_and_names_the_placement() -> None:
    case = RAGGED.but(name="ragged")
    variants = with_placements(case)
    assert {v.placement for v in variants} == set(Placement)
    assert case in variants
    assert {v.name for v in variants} == {f"ragged.{placement.value}" for placement in Placement}


def test_a_single_page_keeps_the_pool_with_poison() -> None:
    assert [v.placement for v in with_placements(RAGGED.but(prefix_lens=(8,), new_lens=(8,)))] == [Placement.SHUFFLED]


def test_a_single_page_is_the_last_one() -> None:
    """Page 0 would be found by a table that was never read."""
    pool = plan_pool([RAGGED.but(prefix_lens=(8,), new_lens=(8,), scratch=Scratch.NONE)])
    assert pool.tables == ((pool.num_pages - 1,),)


def test_shared_needs_two_requests_with_a_full_page() -> None:
    alone = RAGGED.but(prefix_lens=(48, 15), new_lens=(5, 3))
    assert Placement.SHARED not in {v.placement for v in with_placements(alone)}


def test_slot_is_page_times_size_plus_offset() -> None:
    pool = PoolPlan(16, 9, ((7, 2),), 8)
    assert [pool.slot(0, position) for position in (0, 15, 16, 20)] == [112, 127, 32, 36]


def test_batches_that_disagree_about_the_pool_are_refused() -> None:
    with pytest.raises(ValueError, match="share page size"):
        plan_pool([RAGGED, RAGGED.but(page_size=32)])
