"""Pools whose offsets in elements pass int32: laid out as they must be, kept off a CPU, and red for a row whose offsets wrap."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.layouts import huge_pools, longest_contexts
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.pairwise import work
from attnmatrix.cases.placement import plan_pool
from attnmatrix.cases.schedule import schedule
from attnmatrix.cases.suites import gpu_suite, suite
from attnmatrix.harness import probes
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.context import Context
from attnmatrix.harness.diagnose import TOO_LARGE, Diagnosis, diagnose
from attnmatrix.harness.faults.softmax_subject import Plan, SoftmaxSubject
from attnmatrix.harness.probes import PEAKED, POISON
from attnmatrix.harness.registry import Row, find_row
from attnmatrix.harness.row_suite import row_suite
from attnmatrix.harness.trial import run_trial

CPU, EAGER, SOFTMAX = torch.device("cpu"), RunnerMode.EAGER, AttentionKind.SOFTMAX
TORCH = find_row("torch", SOFTMAX)
INT32 = 2**31


def offsets(case: Case, request: int) -> list[int]:
    """Of a request's cached tokens: the first element of each one's last head, in a buffer of keys."""
    plan, width = plan_pool(schedule(case, EAGER).owners), case.heads.kv * case.heads.dim
    return [plan.slot(request, position) * width for position in range(case.prefix_lens[request])]


@pytest.mark.parametrize("case", huge_pools(), ids=lambda case: case.name)
def test_one_buffer_passes_int32_and_so_do_live_tokens(case: Case) -> None:
    plan = plan_pool(schedule(case, EAGER).owners)
    elements = plan.num_pages * case.page_size * case.heads.kv * case.heads.dim
    assert INT32 < elements < 2 * INT32
    live = [offset for request in range(case.batch_size) for offset in offsets(case, request)]
    assert max(live) >= INT32
    assert min(live) < INT32


def test_the_cases_are_a_gpus_own() -> None:
    extra = {case.id for case in (*huge_pools(), *longest_contexts())}
    assert extra.isdisjoint(case.id for case in suite(SOFTMAX, EAGER))
    assert extra <= {case.id for case in gpu_suite(SOFTMAX, EAGER)}
    assert extra.isdisjoint(case.id for case in row_suite(TORCH, EAGER, "cpu", full=True))
    assert extra <= {case.id for case in row_suite(TORCH, EAGER, "cuda", full=False)}
    assert [gpu_suite(SOFTMAX, mode) == suite(SOFTMAX, mode) for mode in RunnerMode if mode is not EAGER] == [True] * (len(RunnerMode) - 1)
    assert {max(case.prefix_lens) for case in longest_contexts()} == {32768}


def test_other_cases_are_tampered_with_first() -> None:
    """Controls are tried on the cheapest cases: a pool of 26 GB is none of them."""
    assert min(work(case) for case in huge_pools()) > max(work(case) for case in suite(SOFTMAX, EAGER) if case.num_tokens < 30)


class OffsetsWrap(SoftmaxSubject):
    """A slot's offset in elements is a signed integer of ``BITS`` bits; where it comes out negative, it counts from the pool's end."""

    BITS = 32

    def slots(self, plan: Plan, layer: int, batch: Batch) -> Tensor:
        kv, heads = self.context.kv, self.context.heads
        assert kv is not None
        width, half = heads.kv * heads.dim, 2 ** (self.BITS - 1)
        wrapped = (super().slots(plan, layer, batch) * width + half) % (2 * half) - half
        return wrapped // width % kv.num_slots


class SmallOffsetsWrap(OffsetsWrap):
    BITS = 18


def row(create: Callable[[Context], AttentionBackend]) -> Row:
    return Row("wraps", SOFTMAX, create, source=__file__)


@pytest.mark.parametrize("case", huge_pools(), ids=lambda case: case.name)
def test_offsets_that_wrap_are_seen_with_spare_pages_only(case: Case) -> None:
    """The same fault and the same live tokens, scaled down: 2**17 elements in place of 2**31."""
    heads = type(case.heads)(2, 1, 16)
    near, far = (case.but(heads=heads, spare_pages=pages) for pages in (0, 2**13 // case.page_size))
    assert run_cell(row(SmallOffsetsWrap), EAGER, near, CPU, controls=()).status == "pass"
    assert run_cell(row(SmallOffsetsWrap), EAGER, far, CPU, controls=(), diagnosed=False).status == "fail"
    assert run_cell(TORCH, EAGER, far, CPU, controls=()).status == "pass"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", huge_pools(), ids=lambda case: case.name)
def test_offsets_that_wrap_in_int32_are_red(case: Case) -> None:
    device = torch.device("cuda")
    assert run_cell(row(SoftmaxSubject), EAGER, case, device, controls=()).status == "pass"
    assert run_cell(row(OffsetsWrap), EAGER, case, device, controls=(), diagnosed=False).status == "fail"


def test_a_failure_is_not_diagnosed_on_pools_filled_again_and_again() -> None:
    small = huge_pools()[0].but(heads=type(huge_pools()[0].heads)(2, 1, 16), spare_pages=2**9)
    trial = run_trial(row(SmallOffsetsWrap), EAGER, small, CPU, PEAKED)
    found: Diagnosis = diagnose(row(SmallOffsetsWrap), EAGER, huge_pools()[0], CPU, trial)
    assert found.why == TOO_LARGE


def test_a_large_buffer_repeats_its_first_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(shape: tuple[int, ...]) -> Tensor:
        tensor = torch.full(shape, float("nan"), dtype=torch.bfloat16)
        probes.fill_values(POISON.poison, tensor, torch.Generator().manual_seed(1))
        return tensor

    drawn = filled((4, 3, 2, 8))
    monkeypatch.setattr(probes, "DRAWN", 4 * 3 * 2 * 8)
    assert torch.equal(filled((4, 3, 2, 8)), drawn)
    assert torch.equal(filled((11, 3, 2, 8)), torch.cat([drawn, drawn, drawn[:3]]))


def test_a_trial_leaves_no_pool_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[weakref.ref[object]] = []

    class Remembered(SoftmaxSubject):
        def __init__(self, context: Context) -> None:
            super().__init__(context)
            pools.append(weakref.ref(context.kv))

    case = huge_pools()[1].but(heads=type(huge_pools()[1].heads)(2, 1, 16), spare_pages=4)
    assert run_trial(row(Remembered), EAGER, case, CPU, PEAKED).passed
    assert [pool() for pool in pools] == [None]
