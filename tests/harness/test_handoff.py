"""Handoff: what one side wrote is read by the other, in the same pool; rows that only understand themselves are red in pairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.cases.suites import suite
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.cell import CellResult, run_cell
from attnmatrix.harness.choose import Place, chosen_rows
from attnmatrix.harness.context import Context
from attnmatrix.harness.controls import CONTROLS
from attnmatrix.harness.hybrid import _pair
from attnmatrix.harness.interpreter import prepare_triton
from attnmatrix.harness.registry import Row, find_row, find_rows

SOFTMAX, HANDOFF, EAGER = AttentionKind.SOFTMAX, RunnerMode.HANDOFF, RunnerMode.EAGER
CPU = torch.device("cpu")
CASE = parse_case("extend-p16-prefix0.0-new15.5-h2x1x32-fp32-shuffled")
prepare_triton(CPU, interpreted=True)


class PrivateCopy(TorchSoftmax):
    """Reads its own copy of the pool, made at first use, into which it writes whatever it writes to the pool."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        kv = self.context.kv
        assert kv is not None
        if layer_id not in self.copies:
            self.copies[layer_id] = kv.k(layer_id).clone(), kv.v(layer_id).clone()
        kv.store(layer_id, batch.out_loc, k, v)
        shared = kv._k[layer_id], kv._v[layer_id]
        kv._k[layer_id], kv._v[layer_id] = self.copies[layer_id]
        try:
            return super().forward(q, k, v, layer_id, batch)
        finally:
            kv._k[layer_id], kv._v[layer_id] = shared


class ReversedKeys(TorchSoftmax):
    """Keys lie in the pool with the head dim reversed, and queries are reversed to match."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q.flip(-1), k.flip(-1), v, layer_id, batch)


TORCH = find_row("torch", SOFTMAX)
PRIVATE = Row("private-copy", SOFTMAX, PrivateCopy, source=__file__)
REVERSED = Row("reversed-keys", SOFTMAX, ReversedKeys, source=__file__)


def run(row: Row, mode: RunnerMode = HANDOFF, case: str = CASE.id) -> CellResult:
    torch.set_num_threads(1)
    return run_cell(row, mode, parse_case(case), CPU, controls=(), diagnosed=False)


def pair(first: Row, second: Row) -> Row:
    return _pair(f"{first.name},{second.name}", first, second)


def worst_by_step(result: CellResult) -> list[float]:
    return [verdict.margin for verdict in result.trials[0].verdicts]


def test_the_turns_go_on_with_the_same_requests() -> None:
    plan = schedule(CASE, HANDOFF)
    assert [batch.forward.value for batch in plan.batches] == ["extend", "decode", "extend", "decode"]
    assert [batch.prefix_lens for batch in plan.batches] == [(0, 0), (15, 5), (16, 6), (17, 7)]
    assert len(set(plan.requests)) == 1 and [batch.kv_lens for batch in plan.owners] == [plan.batches[-1].kv_lens]


@pytest.mark.parametrize("kind", AttentionKind, ids=lambda kind: kind.value)
def test_a_row_reads_what_it_wrote(kind: AttentionKind) -> None:
    for case in suite(kind, HANDOFF):
        if case.page_size < 256:
            result = run_cell(find_row("torch", kind), HANDOFF, case, CPU, controls=())
            assert (result.status, result.reason) == ("pass", ""), case.id


@pytest.mark.parametrize("name", ["torch,conch", "conch,torch", "torch,flex", "flex,torch", "conch,flex", "flex,conch"])
def test_pairs_read_what_the_other_side_wrote(name: str) -> None:
    (row,) = find_rows(name)
    if row.missing:
        pytest.skip(f"{name}: package not installed")
    result = run(row)
    assert (result.status, result.reason) == ("pass", "")


def test_a_row_that_reads_its_own_copy_is_green_alone_and_red_in_a_pair() -> None:
    for mode in (HANDOFF, EAGER):
        assert run(PRIVATE, mode, CASE.id).status == "pass"
    taken_over = run(PRIVATE, EAGER, "decode-p16-prefix14.3-new1.1-h2x1x32-fp32-shuffled")
    assert (taken_over.status, taken_over.trials[-1].probe) == ("fail", "peaked"), "places with a prefix change hands: a copy is stale"
    for row, first_wrong in ((pair(PRIVATE, TORCH), 2), (pair(TORCH, PRIVATE), 3)):
        result = run(row)
        assert result.status == "fail"
        assert [margin > 1 for margin in worst_by_step(result)].index(True) == first_wrong


def test_a_row_that_understands_only_itself_computes_right_alone_and_wrong_in_a_pair() -> None:
    alone = run(REVERSED)
    assert max(worst_by_step(alone)) <= 1
    assert any("do not hold the given K" in line for line in alone.details), "the write guard sees it even alone"
    for row in (pair(REVERSED, TORCH), pair(TORCH, REVERSED)):
        assert [margin > 1 for margin in worst_by_step(run(row))].index(True) == 1


def test_every_control_is_rejected() -> None:
    controls = [control for control in CONTROLS if control.applies(CASE)]
    result = run_cell(pair(TORCH, TORCH), HANDOFF, CASE, CPU, controls=controls)
    assert result.status == "pass", result.reason
    assert sum(count.tried for count in result.controls.values()) >= 3


def test_claims_of_a_pair_are_those_of_the_side_that_runs_each_step() -> None:
    conch, torch_conch = find_rows("conch,torch")[0], find_rows("torch,conch")[0]
    prefix = CASE.but(prefix_lens=(4, 0))
    assert conch.capabilities.known_fault(HANDOFF, prefix) is not None
    assert torch_conch.capabilities.known_fault(HANDOFF, prefix) is None
    sinks = CASE.but(sinks=True)
    for row in (conch, torch_conch):
        assert type(row.capabilities.claim(HANDOFF, sinks, "cpu")).__name__ == "NotApplicable"


def test_a_star_stands_for_every_row_that_shares_the_pool() -> None:
    names = {row.name for row in chosen_rows("*,torch", Place("cpu"))}
    assert "flex,torch" in names and "torch,torch" not in names
    assert all(name.endswith(",torch") for name in names)
