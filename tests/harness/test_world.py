"""A case made concrete: live tokens lie where the tables say, everything else is poison, nothing is in a convenient order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads, Placement, Scratch
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.draws import NUM_LAYERS
from attnmatrix.harness.pools import bits
from attnmatrix.harness.probes import PEAKED, PLAIN, POISON, Probe
from attnmatrix.harness.world import World

CPU = torch.device("cpu")
SOFTMAX = Case(ForwardMode.EXTEND, 16, (20, 0, 33), (3, 17, 1), Heads(4, 2, 32))
LIGHTNING = SOFTMAX.but(kind=AttentionKind.LIGHTNING, heads=Heads(2, 2, 32))


def world(case: Case, mode: RunnerMode = RunnerMode.EAGER, probe: Probe = PEAKED) -> World:
    return World(case, mode, probe, Conventions(), CPU)


def key_pools(made: World) -> list[Tensor]:
    kv = made.context.kv
    assert kv is not None
    return [kv.by_page(kv.k(layer)).flatten(0, 1) for layer in range(NUM_LAYERS)]


def live_slots(made: World) -> Tensor:
    return torch.cat([made.slots(r, 0, p) for step in made.steps for r, p in zip(step.requests, step.case.prefix_lens, strict=True)])


@pytest.mark.parametrize("placement", Placement, ids=lambda placement: placement.value)
@pytest.mark.parametrize("page", [1, 16])
def test_the_table_is_page_times_size_plus_offset(page: int, placement: Placement) -> None:
    made = world(SOFTMAX.but(page_size=page, placement=placement), probe=PLAIN)
    request = 0
    for step in made.steps:
        for length in step.case.kv_lens:
            expected = [made.pool_plan.slot(request, position) for position in range(length)]
            assert made.slots(request, 0, length).tolist() == expected
            request += 1


def test_cached_tokens_are_where_the_table_says() -> None:
    made = world(SOFTMAX)
    for index, step in enumerate(made.steps):
        made.enter(index)
        for request, prefix, length in zip(step.requests, step.prefixes, step.case.prefix_lens, strict=True):
            assert torch.equal(made.req_to_token[made.req_rows[request], :length].long(), made.slots(request, 0, length))
            for layer, pool in enumerate(key_pools(made)):
                assert torch.equal(pool[made.slots(request, 0, length)], prefix.keys[layer])


def test_every_other_request_that_takes_a_row_over_keeps_the_ends_of_its_table() -> None:
    case = SOFTMAX.but(prefix_lens=(70, 50, 33), new_lens=(3, 17, 1))
    made = world(case)
    before, after = made.steps[-2], made.steps[-1]
    assert after.follows == "recycled_rows"
    for number, (old, new, length) in enumerate(zip(before.requests, after.requests, after.case.kv_lens, strict=True)):
        pages = [made.slots(request, 0, length)[::16].tolist() for request in (old, new)]
        kept = [one == other for one, other in zip(*pages, strict=True)]
        assert kept == ([True, *[False] * (len(kept) - 2), True] if number % 2 == 0 else [False] * len(kept))


@pytest.mark.parametrize("probe", [PEAKED, POISON], ids=lambda probe: probe.name)
def test_every_other_slot_is_poison(probe: Probe) -> None:
    made = world(SOFTMAX, probe=probe)
    dead = torch.ones(made.pool_plan.num_pages * 16, dtype=torch.bool)
    dead[live_slots(made)] = False
    assert made.context.kv is not None
    for layer, keys in enumerate(key_pools(made)):
        values = made.context.kv.by_page(made.context.kv.v(layer)).flatten(0, 1)
        if probe is PEAKED:
            assert (keys[dead] == 0).all()
            assert (values[dead].float() == 9984).all()  # 1e4 in bf16
        else:
            assert keys[dead].float().square().mean().sqrt() > 4
            assert values[dead].float().square().mean().sqrt() > 50


def test_two_fills_have_equal_live_inputs() -> None:
    one, other = world(SOFTMAX), world(SOFTMAX, probe=POISON)
    for a, b in zip(one.steps, other.steps, strict=True):
        assert torch.equal(a.hidden, b.hidden)
        for mine, theirs in zip(a.inputs, b.inputs, strict=True):
            assert all(torch.equal(x, y) for x, y in zip((mine.q, mine.k, mine.v), (theirs.q, theirs.k, theirs.v), strict=True))
    assert torch.equal(one.req_to_token, other.req_to_token)


@pytest.mark.parametrize("case", [SOFTMAX, LIGHTNING], ids=lambda case: case.kind.value)
def test_a_name_changes_no_number(case: Case) -> None:
    one, other = world(case), world(case.but(name="renamed"))
    assert torch.equal(one.steps[0].inputs[1].q, other.steps[0].inputs[1].q)
    assert torch.equal(one.req_to_token, other.req_to_token)


def test_layers_and_steps_have_their_own_data() -> None:
    made = world(SOFTMAX)
    assert not torch.equal(made.steps[0].inputs[0].k, made.steps[0].inputs[1].k)
    assert not torch.equal(key_pools(made)[0], key_pools(made)[1])
    assert not torch.equal(made.steps[0].inputs[0].q[:1], made.steps[1].inputs[0].q[:1])


@pytest.mark.parametrize("case", [SOFTMAX, LIGHTNING, SOFTMAX.but(prefix_lens=(5,), new_lens=(1,))], ids=lambda case: case.id)
def test_rows_and_state_slots_are_in_no_order_and_reach_both_ends(case: Case) -> None:
    made = world(case)
    own = made.num_requests - made.steps[-1].case.batch_size  # the last batch takes rows over
    for indices, count in ((made.req_rows[:own], own), (made.state_slots, made.num_requests)):
        assert len(set(indices)) == count
        assert indices != sorted(indices)
        assert {min(indices), max(indices)} == {0, count + 2}
    assert made.req_rows[own:] == made.req_rows[own - made.steps[-1].case.batch_size : own]


def test_rows_past_the_end_hold_valid_slots() -> None:
    made = world(SOFTMAX)
    assert made.req_to_token.min() >= 0
    assert made.req_to_token.max() < made.pool_plan.num_pages * 16


def test_a_prefix_is_a_random_state_and_every_slot_is_stale() -> None:
    made = world(LIGHTNING)
    made.enter(len(made.steps) - 1)
    assert made.context.states is not None
    for layer in range(NUM_LAYERS):
        states = made.context.states.as_kv(made.context.states.state(layer))
        for step in made.steps:
            for request, prefix, length in zip(step.requests, step.prefixes, step.case.prefix_lens, strict=True):
                found = states[made.state_slots[request]]
                assert found.square().mean().sqrt() > 0.04
                assert torch.equal(found, prefix.states[layer]) is bool(length)
                assert prefix.states[layer].any() == bool(length)


def test_requests_with_a_common_prefix_hold_the_same_keys() -> None:
    made = world(SOFTMAX.but(placement=Placement.SHARED, prefix_lens=(20, 0, 33)))
    first, _, third = made.steps[0].prefixes
    assert torch.equal(bits(first.keys[1][:16]), bits(third.keys[1][:16]))
    assert not torch.equal(first.keys[1][16:20], third.keys[1][16:20])


@pytest.mark.parametrize("scratch", Scratch, ids=lambda scratch: scratch.value)
def test_no_request_owns_a_scratch_slot(scratch: Scratch) -> None:
    made = world(SOFTMAX.but(scratch=scratch))
    owned = torch.cat([made.slots(r, 0, n) for step in made.steps for r, n in zip(step.requests, step.case.kv_lens, strict=True)])
    assert not torch.isin(owned, made.scratch_slots).any()
    assert len(made.scratch_slots) == (0 if scratch is Scratch.NONE else 16)


def test_the_batch_by_hand() -> None:
    batch = world(SOFTMAX).batch(0)
    assert (batch.prefix_lens, batch.new_lens, batch.kv_lens) == ((20, 0, 33), (3, 17, 1), (23, 17, 34))
    assert batch.seq_lens.tolist() == [23, 17, 34]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 20, 21]
    assert batch.positions.tolist() == [20, 21, 22, *range(17), 33]
    assert (batch.seq_lens.dtype, batch.cu_seqlens_q.dtype) == (torch.int32, torch.int32)
    assert (batch.req_pool_indices.dtype, batch.out_loc.dtype, batch.positions.dtype) == (torch.int64,) * 3
    assert batch.drafts is None
    assert batch.state_indices is None


def test_the_verify_batch_by_hand() -> None:
    case = SOFTMAX.but(forward=ForwardMode.TARGET_VERIFY, new_lens=(3, 3, 3), trees=((-1, 0, 0),))
    batch = world(case, RunnerMode.VERIFY).batch(0)
    assert batch.seq_lens.tolist() == [20, 0, 33]
    assert batch.positions.tolist() == [20, 21, 21, 0, 1, 1, 33, 34, 34]
    assert batch.drafts is not None
    assert batch.drafts.ancestors.int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]] * 3
    assert not batch.drafts.is_chain


def test_a_mode_refuses_batches_it_does_not_drive() -> None:
    with pytest.raises(ValueError, match="cg_decode does not drive extend batches"):
        world(SOFTMAX, RunnerMode.CG_DECODE)
