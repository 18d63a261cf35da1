"""Rows that keep something from one batch to the next: red, whatever it is keyed by, and green without the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.layouts import decode, extend, long_series
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.speculative import verify
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends.torch_lightning import TorchLightning
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.cell import CellResult, run_cell
from attnmatrix.harness.context import Context
from attnmatrix.harness.registry import Row

CPU = torch.device("cpu")
SOFTMAX, LIGHTNING = AttentionKind.SOFTMAX, AttentionKind.LIGHTNING
EXTEND, DECODE = extend(16, (20, 0), (3, 18), SOFTMAX, dtype="fp32"), decode(16, (14, 16), SOFTMAX, dtype="fp32")
CHAIN = verify(16, (14, 20), 3, SOFTMAX, dtype="fp32")
PLACES = [
    (RunnerMode.EAGER, EXTEND),
    (RunnerMode.EAGER, DECODE),
    (RunnerMode.VERIFY, CHAIN),
    (RunnerMode.CG_DECODE, DECODE),
    (RunnerMode.VERIFY_CG, CHAIN),
    (RunnerMode.PCG_EXTEND, EXTEND),
    (RunnerMode.BCG_EXTEND, EXTEND),
]


class CachedTable(TorchSoftmax):
    """Slots kept by what a batch looks like; ``key`` says what that is. Says nothing of what it prepared."""

    def __init__(self, context: Context, key: Callable[[Batch], Any], kept: dict[Any, Any]) -> None:
        super().__init__(context)
        self.key, self.kept = key, kept

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        slots = self.kept.setdefault((batch.forward_mode, self.key(batch)), batch.attn_metadata.slots)
        batch.attn_metadata = replace(batch.attn_metadata, slots=slots)

    def inspect_metadata(self, batch: Batch) -> None:  # type: ignore[override]
        return None


class CachedKeys(TorchSoftmax):
    """The prefix's keys of a request kept by the slots it lies in."""

    kept: dict[Any, Tensor]

    def _attend(self, q: Tensor, slots: Tensor, visible: Tensor, distance: Tensor, layer: int) -> Tensor:
        kv = self.context.kv
        assert kv is not None
        page, at = slots[0, :8] // kv.page_size, slots[0, :8] % kv.page_size
        now = kv.k(layer)[page, at].clone()
        before = self.kept.setdefault((layer, q.shape, tuple(slots.flatten().tolist())), now)
        kv.k(layer)[page, at] = before
        out = super()._attend(q, slots, visible, distance, layer)
        kv.k(layer)[page, at] = now
        return out


class FirstPool(TorchSoftmax):
    """Reads the pool of the first instance ever made for such a case: it hands its address on."""

    pools: list[Any]

    def _attend(self, q: Tensor, slots: Tensor, visible: Tensor, distance: Tensor, layer: int) -> Tensor:
        self.pools.append(self.context.kv)
        own, self.context = self.context, replace(self.context, kv=self.pools[0])
        out = super()._attend(q, slots, visible, distance, layer)
        self.context = own
        return out


def judged(create: Callable[[Context], AttentionBackend], mode: RunnerMode, case: Case) -> CellResult:
    return run_cell(Row("cached", case.kind, create, source=__file__), mode, case, CPU, controls=(), diagnosed=False)


def _rows(batch: Batch) -> Any:
    return tuple(batch.req_pool_indices.tolist()), batch.kv_lens


def _lens(batch: Batch) -> Any:
    return batch.kv_lens, batch.new_lens


@pytest.mark.parametrize(("mode", "case"), PLACES, ids=lambda part: getattr(part, "value", getattr(part, "forward", "")))
@pytest.mark.parametrize("key", [_rows, _lens], ids=["rows_and_lengths", "lengths"])
@pytest.mark.parametrize("shared", [False, True], ids=["instance", "process"])
def test_a_table_kept_from_a_batch_that_looks_the_same(mode: RunnerMode, case: Case, key: Callable[[Batch], Any], shared: bool) -> None:
    everywhere: dict[Any, Any] = {}
    result = judged(lambda context: CachedTable(context, key, everywhere if shared else {}), mode, case)
    assert result.status == "fail"
    assert result.trials[0].error is None


@pytest.mark.parametrize(("mode", "case"), PLACES, ids=lambda part: getattr(part, "value", getattr(part, "forward", "")))
def test_a_table_looked_up_afresh_is_right(mode: RunnerMode, case: Case) -> None:
    assert judged(lambda context: CachedTable(context, lambda batch: object(), {}), mode, case).status == "pass"


def test_keys_kept_by_the_pages_they_lie_in() -> None:
    """Pages are handed to other requests: only the needle probe's last batch, in the pages of the one before, tells."""

    def create(context: Context) -> AttentionBackend:
        backend = CachedKeys(context)
        backend.kept = {}
        return backend

    result = judged(create, RunnerMode.EAGER, extend(16, (20, 9), (3, 2), SOFTMAX, dtype="fp32"))
    assert result.status == "fail"
    assert result.trials[-1].probe == "needle"
    assert {m.step for verdict in result.trials[-1].verdicts for m in verdict.measurements if float(m.ratio.max()) > 1} == {2}


@pytest.mark.parametrize("mode_case", PLACES[:3], ids=lambda part: part[0].value)
def test_the_pool_of_an_instance_before(mode_case: tuple[RunnerMode, Case]) -> None:
    pools: list[Any] = []

    def create(context: Context) -> AttentionBackend:
        backend = FirstPool(context)
        backend.pools = pools
        return backend

    assert judged(create, *mode_case).status == "fail"


class KeptStates(TorchLightning):
    """State slots kept by request rows."""

    kept: dict[Any, Tensor]

    def prepare_metadata(self, batch: Batch) -> None:
        assert batch.state_indices is not None
        kept = self.kept.setdefault(_rows(batch), batch.state_indices.clone())
        given = replace(batch, state_indices=kept)
        super().prepare_metadata(given)
        batch.attn_metadata = given.attn_metadata

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q, k, v, layer_id, replace(batch, state_indices=self.kept[_rows(batch)]))


def test_state_slots_kept_from_requests_in_the_same_rows() -> None:
    def create(context: Context) -> AttentionBackend:
        backend = KeptStates(context)
        backend.kept = {}
        return backend

    assert judged(create, RunnerMode.EAGER, extend(16, (20, 0), (3, 5), LIGHTNING, dtype="fp32")).status == "fail"


class WrongLater(TorchSoftmax):
    """Right until the ``good``-th call of an instance."""

    good = 24
    calls = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        self.calls += 1
        out = super().forward(q, k, v, layer_id, batch)
        return out if self.calls <= self.good else out * 1.1


@pytest.mark.parametrize("case", long_series(SOFTMAX), ids=lambda case: case.name)
def test_what_goes_wrong_after_many_calls(case: Case) -> None:
    assert judged(WrongLater, RunnerMode.EAGER, case).status == "fail"
    assert judged(TorchSoftmax, RunnerMode.EAGER, case).status == "pass"


class LateWrite(TorchSoftmax):
    """Layer 0 attends right, but its keys are back in the pool only when layer 1 is done."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        out = super().forward(q, k, v, layer_id, batch)
        assert self.context.kv is not None
        if layer_id == 0:
            self.context.kv.store(0, batch.out_loc, k * 0, v * 0)
            self.late = k, v
        else:
            self.context.kv.store(0, batch.out_loc, *self.late)
        return out


@pytest.mark.parametrize(("mode", "case"), PLACES, ids=lambda part: getattr(part, "value", getattr(part, "forward", "")))
def test_keys_written_only_with_the_last_layer(mode: RunnerMode, case: Case) -> None:
    result = judged(LateWrite, mode, case)
    assert result.status == "fail"
    assert any("layer 0: the batch's own slots were written after" in line for line in result.details)


class LateState(TorchLightning):
    """Layer 0's states are back in the pool only when layer 1 is done."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        out = super().forward(q, k, v, layer_id, batch)
        assert self.context.states is not None
        assert batch.state_indices is not None
        pool, own = self.context.states.state(0), batch.state_indices.long()
        if layer_id == 0:
            self.late = pool[own].clone()
            pool[own] = 0.0
        else:
            pool[own] = self.late
        return out


def test_states_written_only_with_the_last_layer() -> None:
    result = judged(LateState, RunnerMode.EAGER, extend(16, (20, 9), (3, 5), LIGHTNING, dtype="fp32"))
    assert result.status == "fail"
    assert any("written after the layer's call" in line for line in result.details)
