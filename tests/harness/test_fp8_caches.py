"""A cache in fp8 with scales: what is written to within a step, what is read to the limit, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.options import KV_SCALES
from attnmatrix.cases.pairwise import runner_subset
from attnmatrix.cases.suites import suite
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.context import Context
from attnmatrix.harness.controls import CONTROLS
from attnmatrix.harness.expected import expected_quantities
from attnmatrix.harness.faults.softmax_subject import SoftmaxSubject
from attnmatrix.harness.guards import Guards
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.produced import held
from attnmatrix.harness.registry import Row, find_row
from attnmatrix.harness.runners import RUNNERS
from attnmatrix.harness.world import World

CPU = torch.device("cpu")
EXTEND = parse_case("extend-p4-prefix5.0-new3.2-h4x2x64-bf16-shuffled-kvfp8e4m3")
DECODE = parse_case("decode-p4-prefix5.3-new1.1-h4x2x64-fp16-shuffled-kvfp8e4m3")
CHAIN = parse_case("target_verify-p4-prefix5.3-new3.3-h4x2x64-bf16-shuffled-kvfp8e4m3")
MODES = (
    (RunnerMode.EAGER, EXTEND),
    (RunnerMode.EAGER, DECODE),
    (RunnerMode.CG_DECODE, DECODE),
    (RunnerMode.PCG_EXTEND, EXTEND),
    (RunnerMode.BCG_EXTEND, EXTEND),
    (RunnerMode.VERIFY, CHAIN),
    (RunnerMode.VERIFY_CG, CHAIN),
    (RunnerMode.HANDOFF, EXTEND),
)


def made(case: Case = EXTEND, kv_layout: str = "NHD") -> World:
    return World(case, RunnerMode.EAGER, PEAKED, Conventions(kv_layout=kv_layout), CPU)


def problems(tamper: Callable[[World], None], case: Case = EXTEND, kv_layout: str = "NHD") -> list[str]:
    """What the guards say of a right first step after ``tamper``."""
    world = made(case, kv_layout)
    guards = Guards(world)
    run = next(iter(RUNNERS[RunnerMode.EAGER](world, TorchSoftmax(world.context))))
    tamper(world)
    run.calls = [replace(call, left=held(world.context, world.batch(0), call.layer)) for call in run.calls]  # as if the calls had left it
    return guards.check(run)


def codes(world: World, slot: int, layer: int = 1) -> Tensor:
    """uint8 ``[H, D]``: a view of the keys in one slot."""
    kv = world.context.kv
    assert kv is not None
    return kv.by_page(kv.k(layer)).view(torch.uint8)[slot // kv.page_size, slot % kv.page_size]


def new_slot(world: World) -> int:
    return int(world.slots(0, 6, 7))


def test_scales_are_none_of_them_1_and_all_different() -> None:
    scales = [scale for layer in KV_SCALES for scale in layer]
    assert len({1.0, *scales}) == len(scales) + 1
    assert EXTEND.kv_scales(0) != EXTEND.kv_scales(1)
    assert EXTEND.but(kv_dtype=None).kv_scales(0) == (1.0, 1.0)
    context = made().context
    assert [(context.k_scale(layer), context.v_scale(layer)) for layer in (0, 1)] == [EXTEND.kv_scales(layer) for layer in (0, 1)]
    assert made(EXTEND.but(kv_dtype=None)).context.k_scale(1) == 1.0


def test_some_keys_reach_the_largest_value() -> None:
    world = made()
    kv = world.context.kv
    assert kv is not None
    held = kv.as_held(1, world.steps[0].inputs[1].k, world.steps[0].inputs[1].v)[0].float().abs()
    assert 0 < int((held == 448).sum()) < held.numel() / 10


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
def test_a_new_token_may_be_one_step_off(layout: str) -> None:
    def nudge(world: World) -> None:
        held = codes(world, new_slot(world))
        away = (held & 0x7F) < 0x7E
        held += away.to(torch.uint8)

    assert problems(nudge, kv_layout=layout) == []


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
def test_a_new_token_may_not_be_two_steps_off(layout: str) -> None:
    def nudge(world: World) -> None:
        held = codes(world, new_slot(world))
        at = ((held & 0x7F) < 0x7D).nonzero()[0]
        held[at[0], at[1]] += 2

    assert [line.split(" (")[0] for line in problems(nudge, kv_layout=layout)] == [
        "layer 1, K pool: 1 of 5 slots in out_loc do not hold the given K"
    ]


def test_nan_is_not_a_step_beyond_the_largest_value() -> None:
    def spoil(world: World) -> None:
        codes(world, new_slot(world))[0, 0] = 0x7F

    assert len(problems(spoil)) == 1


def test_a_cached_token_may_not_move_at_all() -> None:
    def nudge(world: World) -> None:
        codes(world, int(world.slots(0, 2, 3)))[1, 3] ^= 1

    found = problems(nudge)
    assert len(found) == 1
    assert "outside out_loc changed" in found[0]


def test_a_cache_that_is_not_quantised_may_not_move_at_all() -> None:
    def nudge(world: World) -> None:
        kv = world.context.kv
        assert kv is not None
        slot = new_slot(world)
        kv.by_page(kv.k(1)).view(torch.int16)[slot // kv.page_size, slot % kv.page_size, 0, 0] ^= 1

    assert len(problems(nudge, EXTEND.but(kv_dtype=None))) == 1


def test_the_reference_reads_what_the_pool_holds() -> None:
    """Recomputed from the bytes in the pool, request by request."""
    world = made()
    run = next(iter(RUNNERS[RunnerMode.EAGER](world, TorchSoftmax(world.context))))
    kv = world.context.kv
    assert kv is not None
    for call in run.calls:
        outs, start = [], 0
        for request, (prefix, new) in enumerate(zip(EXTEND.prefix_lens, EXTEND.new_lens, strict=True)):
            slots = world.slots(request, 0, prefix + new)
            k_scale, v_scale = KV_SCALES[call.layer]
            pools = (kv.k(call.layer).double() * k_scale, kv.v(call.layer).double() * v_scale)
            k, v = (pool.flatten(0, 1)[slots].repeat_interleave(2, dim=1) for pool in pools)
            score = torch.einsum("nhd,khd->hnk", call.q[start : start + new].double(), k) * EXTEND.heads.dim**-0.5
            score = score.masked_fill(~torch.ones(new, prefix + new, dtype=torch.bool).tril(prefix), -torch.inf)
            outs.append(torch.einsum("hnk,khd->nhd", score.softmax(dim=-1), v))
            start += new
        right = expected_quantities(world, 0, call)["out"].reference
        assert torch.allclose(right, torch.cat(outs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("mode", "case"), MODES, ids=[f"{mode.value}-{case.forward.value}" for mode, case in MODES])
def test_the_torch_row_reads_scaled_caches(mode: RunnerMode, case: Case) -> None:
    controls = [control for control in CONTROLS if control.kind == "kv-scale"]
    assert [control.applies(case) for control in controls] == [True]
    result = run_cell(find_row("torch", AttentionKind.SOFTMAX), mode, case, CPU, controls=controls)
    assert result.status == "pass", (result.reason, *result.details)
    assert result.controls["kv-scale"].rejected == 1


def test_the_control_leaves_other_caches_alone() -> None:
    control = next(control for control in CONTROLS if control.kind == "kv-scale")
    assert not control.applies(EXTEND.but(kv_dtype=None))
    assert not control.applies(parse_case("extend-p4-prefix0-new1-h4x2x64-bf16-shuffled-kvfp8e4m3"))


def status(create: Callable[[Context], AttentionBackend], case: Case = EXTEND) -> str:
    return run_cell(
        Row("broken", AttentionKind.SOFTMAX, create, source=__file__), RunnerMode.EAGER, case, CPU, controls=(), diagnosed=False
    ).status


def test_a_row_that_knows_no_scales_fails() -> None:
    assert status(TorchSoftmax) == "pass"
    assert status(lambda context: TorchSoftmax(replace(context, k_scales=(1.0, 1.0)))) == "fail"
    assert status(lambda context: TorchSoftmax(replace(context, v_scales=(1.0, 1.0)))) == "fail"


class OneStepUp(SoftmaxSubject):
    """Every new key one step larger: within what the guard of writes allows."""

    def write(self, k: Tensor, v: Tensor, layer: int, batch: Batch) -> None:
        super().write(k, v, layer, batch)
        kv = self.context.kv
        assert kv is not None
        page, offset = batch.out_loc // kv.page_size, batch.out_loc % kv.page_size
        held = kv.by_page(kv.k(layer)).view(torch.uint8)
        now = held[page, offset]
        held[page, offset] = torch.where((now & 0x7F) < 0x7E, now + 1, now)


def test_the_freedom_of_a_step_is_no_freedom_of_the_output() -> None:
    row = Row("broken", AttentionKind.SOFTMAX, OneStepUp, source=__file__)
    result = run_cell(row, RunnerMode.EAGER, EXTEND, CPU, controls=(), diagnosed=False)
    assert result.status == "fail"
    assert all("over their limit" in line for line in result.details), result.details


@pytest.mark.parametrize("kind", AttentionKind)
@pytest.mark.parametrize("mode", RunnerMode)
def test_every_softmax_mode_has_a_scaled_cache_and_keeps_it_when_sampled(mode: RunnerMode, kind: AttentionKind) -> None:
    cases = suite(kind, mode)
    forwards = {case.forward for case in cases if case.kv_dtype}
    if kind is not AttentionKind.SOFTMAX or not cases:
        assert forwards == set()
        return
    mixed = set() if mode is RunnerMode.EAGER else {ForwardMode.MIXED}
    assert forwards == set(mode.forward_modes) - {ForwardMode.IDLE} - mixed
    assert {case.forward for case in runner_subset(cases) if case.kv_dtype} == forwards


def test_the_suite_meets_what_caches_differ_in() -> None:
    cases = [case for mode in RunnerMode for case in suite(AttentionKind.SOFTMAX, mode) if case.kv_dtype]
    assert {case.page_size for case in cases} >= {1, 16, 64, 256}
    assert {case.heads.dim for case in cases} >= {64, 128}
    assert {case.dtype for case in cases} >= {"bf16", "fp16"}
    assert any(case.heads.group == 1 for case in cases)
    assert any(case.heads == Heads(8, 2, 64) for case in cases)
