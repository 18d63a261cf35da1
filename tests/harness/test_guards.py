"""Every write that a step may not make gives one line, and the line names whose slot it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads, Scratch
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.guards import Guards
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.runners import RUNNERS
from attnmatrix.harness.runners.recorder import StepRun
from attnmatrix.harness.world import World

CPU = torch.device("cpu")
SOFTMAX = Case(ForwardMode.EXTEND, 4, (5, 0), (3, 2), Heads(2, 1, 8), dtype="fp32", sinks=True, alibi=True)
LIGHTNING = Case(ForwardMode.EXTEND, 4, (5, 0, 4), (3, 2, 0), Heads(2, 2, 8), dtype="fp32", kind=AttentionKind.LIGHTNING)
VERIFY = LIGHTNING.but(forward=ForwardMode.TARGET_VERIFY, new_lens=(3, 3, 3))

Tampering = Callable[[World, StepRun], object]


def lines(case: Case, tamper: Tampering | None, kv_layout: str = "NHD") -> list[str]:
    """What the guards say of a right first step after ``tamper`` changed something."""
    mode = RunnerMode.VERIFY if case.forward is ForwardMode.TARGET_VERIFY else RunnerMode.EAGER
    world = World(case, mode, PEAKED, Conventions(kv_layout=kv_layout), CPU)
    guards = Guards(world)
    run = next(iter(RUNNERS[mode](world, find_row("torch", case.kind).create(world.context))))
    if tamper is not None:
        tamper(world, run)
    return guards.check(run)


def slot_of(world: World, request: int, position: int) -> int:
    return int(world.slots(request, position, position + 1))


def spare_slot(world: World) -> int:
    plan = world.pool_plan
    used = {page for table in plan.tables for page in table} | {plan.scratch_page}
    return min(set(range(plan.num_pages)) - used) * plan.page_size + 1


def entry(world: World, name: str, layer: int, slot: int) -> Tensor:
    """``[H, D]``: a view of one slot of a KV pool."""
    kv = world.context.kv
    assert kv is not None
    return kv.by_page(kv.k(layer) if name == "K" else kv.v(layer))[slot // kv.page_size, slot % kv.page_size]


def state(world: World, request: int, layer: int) -> Tensor:
    assert world.context.states is not None
    return world.context.states.state(layer)[world.state_slots[request]]


@pytest.mark.parametrize("case", [SOFTMAX, LIGHTNING, VERIFY, SOFTMAX.but(scratch=Scratch.NONE)], ids=lambda case: case.id)
def test_a_right_step_is_not_complained_about(case: Case) -> None:
    assert lines(case, None) == []


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
@pytest.mark.parametrize("name", ["K", "V"])
@pytest.mark.parametrize("layer", [0, 1])
def test_another_requests_slot(layer: int, name: str, layout: str) -> None:
    """Request 2 is the first of the batch that runs later."""
    found = lines(SOFTMAX, lambda world, run: entry(world, name, layer, slot_of(world, 2, 1))[0, 3].add_(1).zero_(), layout)
    assert len(found) == 1
    assert found[0].startswith(f"layer {layer}, {name} pool: 1 slots outside out_loc changed")
    assert "request 2 position 1" in found[0]


def test_a_cached_token_of_the_own_request() -> None:
    found = lines(SOFTMAX, lambda world, run: entry(world, "K", 1, slot_of(world, 0, 4)).zero_())
    assert ["outside out_loc changed" in line and "request 0 position 4" in line for line in found] == [True]


def test_a_slot_that_nobody_owns() -> None:
    found = lines(SOFTMAX, lambda world, run: entry(world, "V", 0, spare_slot(world)).zero_())
    assert len(found) == 1
    assert "no request's" in found[0]


def test_a_changed_sign_of_zero() -> None:
    """Unused keys are 0: -0.0 compares equal, but is another bit pattern."""
    found = lines(SOFTMAX, lambda world, run: entry(world, "K", 0, spare_slot(world)).neg_())
    assert len(found) == 1


def test_a_new_token_that_was_not_written() -> None:
    found = lines(SOFTMAX, lambda world, run: entry(world, "K", 1, slot_of(world, 1, 1)).zero_())
    assert len(found) == 1
    assert "1 of 5 slots in out_loc do not hold the given K" in found[0]
    assert "request 1 position 1" in found[0]


def test_a_new_token_of_the_next_batch_is_foreign() -> None:
    found = lines(SOFTMAX, lambda world, run: entry(world, "V", 0, slot_of(world, 2, world.steps[1].case.prefix_lens[0])).zero_())
    assert len(found) == 1
    assert "outside out_loc" in found[0]


def test_the_next_step_is_not_blamed_for_the_last() -> None:
    def check_first(world: World, run: StepRun) -> None:
        guards = Guards(world)
        entry(world, "K", 0, slot_of(world, 2, 1)).zero_()
        assert guards.check(run)
        blamed.extend(guards.check(run))

    blamed: list[str] = []
    lines(SOFTMAX, check_first)
    assert blamed == []


def test_the_scratch_page_is_exempt() -> None:
    assert lines(SOFTMAX, lambda world, run: entry(world, "K", 0, int(world.scratch_slots[0])).fill_(3.0)) == []


def test_out_of_bounds() -> None:
    def overrun(world: World, run: StepRun) -> None:
        assert world.context.kv is not None
        pool = world.context.kv.v(1)
        pool.as_strided((1,), (1,), pool.storage_offset() + pool.numel()).zero_()

    found = lines(SOFTMAX, overrun)
    assert len(found) == 1
    assert "KV pool" in found[0]
    assert "out of bounds" in found[0]


@pytest.mark.parametrize(("index", "name"), list(enumerate("qkv")))
def test_a_modified_input(index: int, name: str) -> None:
    found = lines(SOFTMAX, lambda world, run: run.calls[1].given[index][0].neg_())
    assert found == [f"layer 1: forward modified its input {name}"]


def test_a_modified_table() -> None:
    assert lines(SOFTMAX, lambda world, run: world.req_to_token[-1, -1].add_(1)) == ["req_to_token was modified"]


@pytest.mark.parametrize(
    ("case", "name"), [(SOFTMAX, "sinks"), (SOFTMAX, "alibi_slopes"), (LIGHTNING, "slopes")], ids=lambda v: str(v)[:12]
)
def test_a_modified_constant(case: Case, name: str) -> None:
    """The reference reads it after the backend: a change would hide itself."""
    assert lines(case, lambda world, run: getattr(world.context, name).mul_(2.0)) == [f"{name} was modified"]


def test_two_violations_give_two_lines() -> None:
    def both(world: World, run: StepRun) -> None:
        entry(world, "K", 0, slot_of(world, 2, 0)).zero_()
        world.req_to_token[-1, -1] += 1

    assert len(lines(SOFTMAX, both)) == 2


@pytest.mark.parametrize("layer", [0, 1])
def test_the_state_of_another_request(layer: int) -> None:
    found = lines(LIGHTNING, lambda world, run: state(world, 3, layer)[0, 0, 0].zero_())
    assert len(found) == 1
    assert found[0].startswith(f"layer {layer}: 1 states changed")
    assert "request 3's" in found[0]


def test_a_state_slot_that_nobody_owns() -> None:
    def write(world: World, run: StepRun) -> None:
        assert world.context.states is not None
        spare = min(set(range(world.context.states.num_slots)) - set(world.state_slots))
        world.context.states.state(0)[spare].zero_()

    found = lines(LIGHTNING, write)
    assert len(found) == 1
    assert "no request's" in found[0]


def test_the_state_of_a_request_without_new_tokens() -> None:
    found = lines(LIGHTNING, lambda world, run: state(world, 2, 0).zero_())
    assert len(found) == 1
    assert "request 2's" in found[0]


def test_an_intermediate_state_outside_verify() -> None:
    def write(world: World, run: StepRun) -> None:
        assert world.context.states is not None
        world.context.states.intermediate(1)[0, 0].zero_()

    found = lines(LIGHTNING, write)
    assert len(found) == 1
    assert "(0, 0)" in found[0]


def test_verify_leaves_the_live_state_alone() -> None:
    found = lines(VERIFY, lambda world, run: state(world, 1, 0).zero_())
    assert len(found) == 1
    assert "request 1's" in found[0]


def test_an_intermediate_state_past_the_batch() -> None:
    def write(world: World, run: StepRun) -> None:
        assert world.context.states is not None
        world.context.states.intermediate(0)[:, -1].zero_()

    case = VERIFY.but(new_lens=(3, 1, 2))
    found = lines(case, write)
    assert len(found) == 1
    assert "(1, 2)" in found[0]
    assert "(2, 2)" in found[0]
    assert "(0, 2)" not in found[0]
