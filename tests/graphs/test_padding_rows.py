"""Rows that mishandle padding, or write where they should not: red with the fault switched on, green with it off."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case, Scratch
from attnmatrix.cases.layouts import decode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends.torch_lightning import TorchLightning
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.cell import CellResult

Outcome = Callable[..., CellResult]
DECODE = decode(16, (40, 20, 33), AttentionKind.SOFTMAX, dtype="fp32")
LINEAR = decode(16, (40, 20, 33), AttentionKind.LIGHTNING, dtype="fp32")


class WriterOfItsOwn(TorchSoftmax):
    """A row whose kernel appends keys and values through its own page table, at the position that the length gives."""

    broken: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        own = replace(batch, out_loc=batch.attn_metadata.slots.gather(1, batch.attn_metadata.prefix[:, None].long())[:, 0])
        return super().forward(q, k, v, layer_id, own)

    def prepare_for_capture(self, batch: Batch) -> None:
        super().prepare_for_capture(batch)
        batch.attn_metadata.slots.fill_(int(batch.out_loc[0]))

    def prepare_for_replay(self, batch: Batch) -> None:
        static, fresh = self._static[batch.padded_reqs], batch.attn_metadata
        static.prefix.copy_(fresh.prefix)
        static.slots[: batch.size, : fresh.slots.shape[1]].copy_(fresh.slots[: batch.size])
        if batch.size < batch.padded_reqs:
            cleared = self.context.page_size if self.broken else None
            static.slots[batch.size :, :cleared] = int(batch.out_loc[-1])


class OnlyFirstColumnCleared(WriterOfItsOwn):
    """Padded rows have only the first page of their table cleared: a stale length finds another request's page behind it."""


class ScratchReadUnmasked(TorchSoftmax):
    """Columns past the end point at slot 0, the scratch page, whose values are multiplied by a probability of zero."""

    broken: bool

    def _attend(self, q: Tensor, slots: Tensor, visible: Tensor, distance: Tensor, layer: int) -> Tensor:
        if not self.broken:
            return super()._attend(q, slots, visible, distance, layer)
        kv, size = self.context.kv, self.context.page_size
        assert kv is not None
        keys, values = (kv.by_page(pool)[slots // size, slots % size] for pool in (kv.k(layer), kv.v(layer)))
        group = q.shape[2] // keys.shape[2]
        keys, values = (t.repeat_interleave(group, dim=2).transpose(1, 2) for t in (keys, values))
        score = q.transpose(1, 2) @ keys.transpose(-1, -2) * self.context.scale
        weight = score.masked_fill(~visible[:, None], float("-inf")).softmax(dim=-1)
        return (weight @ values).transpose(1, 2)


class PaddingWritesLiveSlot(TorchSoftmax):
    """At replay the slots come from the table, for padded rows too, which stand in a live request's row."""

    broken: bool

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        super().init_capture_graph(max_seq_len, batch_sizes)
        self._out_loc = {size: torch.zeros(size, dtype=torch.int64) for size in batch_sizes}

    def prepare_for_capture(self, batch: Batch) -> None:
        super().prepare_for_capture(batch)
        self._out_loc[batch.padded_reqs].copy_(batch.out_loc)

    def prepare_for_replay(self, batch: Batch) -> None:
        super().prepare_for_replay(batch)
        derived = self.context.req_to_token[batch.req_pool_indices, batch.positions].long()
        self._out_loc[batch.padded_reqs].copy_(derived if self.broken else batch.out_loc)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q, k, v, layer_id, replace(batch, out_loc=self._out_loc[batch.padded_reqs]))


class PaddingSharesAStateSlot(TorchLightning):
    """Padded rows take slot 0, a live request's, for their own."""

    broken: bool

    def prepare_for_replay(self, batch: Batch) -> None:
        super().prepare_for_replay(batch)
        if self.broken:
            self._static[batch.padded_reqs].state_indices.clamp_(min=0)


class StateSlotsOfTheCapture(TorchLightning):
    """State slots are refreshed for the live rows only: padded ones keep those of an earlier batch."""

    broken: bool

    def prepare_for_replay(self, batch: Batch) -> None:
        indices = self._static[batch.padded_reqs].state_indices
        kept = indices.clone()
        super().prepare_for_replay(batch)
        if self.broken:
            indices[batch.size :] = kept[batch.size :]


class WarmUpWritesLiveSlot(TorchSoftmax):
    """The first call after ``prepare_for_capture`` writes where the table says, not where it was told."""

    broken: bool

    def prepare_for_capture(self, batch: Batch) -> None:
        super().prepare_for_capture(batch)
        self._fresh = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        told = batch
        if self.broken and self._fresh:
            told = replace(batch, out_loc=self.context.req_to_token[batch.req_pool_indices, batch.positions].long())
        self._fresh = False
        return super().forward(q, k, v, layer_id, told)


class PositionsAdvanced(TorchSoftmax):
    """The batch's positions are moved on in place, for a step that is not to come."""

    broken: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        out = super().forward(q, k, v, layer_id, batch)
        if self.broken and layer_id == 1:
            batch.positions.add_(1)
        return out


CG_DECODE = RunnerMode.CG_DECODE
FAULTS = (
    (OnlyFirstColumnCleared, "slots outside out_loc changed", CG_DECODE, DECODE),
    (ScratchReadUnmasked, "error inf", CG_DECODE, DECODE.but(scratch=Scratch.FIRST)),
    (PaddingWritesLiveSlot, "slots outside out_loc changed", CG_DECODE, DECODE),
    (PaddingSharesAStateSlot, "states changed", CG_DECODE, LINEAR),
    (StateSlotsOfTheCapture, "states changed", CG_DECODE, LINEAR),
    (WarmUpWritesLiveSlot, "warm-up or capture: .*slots outside out_loc changed", CG_DECODE, DECODE),
    (PositionsAdvanced, "the backend modified batch.positions", CG_DECODE, DECODE),
)


@pytest.mark.parametrize(("backend", "finding", "mode", "case"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_it_is_red(outcome: Outcome, backend: type[AttentionBackend], finding: str, mode: RunnerMode, case: Case) -> None:
    result = outcome(backend, True, mode, case)
    assert result.status == "fail"
    assert re.search(finding, "\n".join(result.details)), result.details


@pytest.mark.parametrize(("backend", "finding", "mode", "case"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_without_the_change_it_is_green(
    outcome: Outcome, backend: type[AttentionBackend], finding: str, mode: RunnerMode, case: Case
) -> None:
    result = outcome(backend, False, mode, case)
    assert result.status == "pass", result.details
