"""Rows that must show: a working row broken in one way is red on the cases meant for it, and green with the change off."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from named_cases import case_named
from torch import Tensor

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends.torch_lightning import TorchLightning
from attnmatrix.harness.backends.torch_softmax import ExtendMetadata, TorchSoftmax
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.cell import CellResult, run_cell
from attnmatrix.harness.context import Context
from attnmatrix.harness.registry import Row

CPU = torch.device("cpu")


class Softmax(TorchSoftmax):
    """The row to break; ``broken`` switches the change of a subclass on."""

    def __init__(self, context: Context, broken: bool) -> None:
        super().__init__(context)
        self.broken = broken


class Lightning(TorchLightning):
    """The linear row to break."""

    def __init__(self, context: Context, broken: bool) -> None:
        super().__init__(context)
        self.broken = broken


class TopLeftMask(Softmax):
    """The causal mask aligned with the first keys: new token i sees keys 0 to i."""

    def _attend(self, q: Tensor, slots: Tensor, visible: Tensor, distance: Tensor, layer: int) -> Tensor:
        return super()._attend(q, slots, torch.ones_like(visible).tril() if self.broken else visible, distance, layer)


class LengthOffByOne(Softmax):
    """Attention over one key less than there are."""

    def prepare_metadata(self, batch: Batch) -> None:
        shorter = replace(batch, seq_lens=batch.seq_lens - 1) if self.broken else batch
        super().prepare_metadata(shorter)
        batch.attn_metadata = shorter.attn_metadata


class WriteSkipped(Softmax):
    """The last token of a batch never reaches the pool of layer 1."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        kv, slot = self.context.kv, batch.out_loc[-1:]
        if self.broken and layer_id == 1 and kv is not None:
            page, offset = slot // kv.page_size, slot % kv.page_size
            k, v = (torch.cat([new[:-1], kv.by_page(old)[page, offset]]) for new, old in ((k, kv.k(1)), (v, kv.v(1))))
        return super().forward(q, k, v, layer_id, batch)


class ContiguousPages(Softmax):
    """Page i of a request is taken to lie i pages after its first one, whatever the table says."""

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        meta = batch.attn_metadata
        if self.broken and isinstance(meta, ExtendMetadata):
            meta.slots = tuple(self._in_order(slots) for slots in meta.slots)
        elif self.broken:
            meta.slots = torch.stack([self._in_order(slots) for slots in meta.slots])

    def _in_order(self, slots: Tensor) -> Tensor:
        assert self.context.kv is not None
        return (slots[:1] + torch.arange(len(slots))) % self.context.kv.num_slots


class ForeignWrite(Softmax):
    """Writes its last token right, and once more over another request's first token, whose batch has finished already."""

    def __init__(self, context: Context, broken: bool) -> None:
        super().__init__(context, broken)
        self.prepared: list[Batch] = []

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        self.prepared.append(batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        out = super().forward(q, k, v, layer_id, batch)
        if self.broken and batch is not self.prepared[0]:
            assert self.context.kv is not None
            victim = self.context.req_to_token[self.prepared[0].req_pool_indices[:1], 0].long()
            self.context.kv.store(layer_id, victim, k[-1:], v[-1:])
        return out


class LayerZeroRead(Softmax):
    """Layer 1 attends to what layer 0 wrote."""

    def _attend(self, q: Tensor, slots: Tensor, visible: Tensor, distance: Tensor, layer: int) -> Tensor:
        return super()._attend(q, slots, visible, distance, 0 if self.broken else layer)


class RowNeverWritten(Softmax):
    """The output row of the last token is left as it was allocated, in memory that held the right answer a moment ago."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        right = super().forward(q, k, v, layer_id, batch)
        if not self.broken:
            return right
        written = right[:-1].clone()
        del right
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        out[:-1] = written
        return out


class LengthsBumpedInPlace(Softmax):
    """Right results, but the engine's lengths are one larger afterwards."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        out = super().forward(q, k, v, layer_id, batch)
        if self.broken and layer_id == 1:
            batch.seq_lens.add_(1)
        return out


class NeighbourState(Lightning):
    """Each request works on the state slot of its neighbour."""

    def prepare_metadata(self, batch: Batch) -> None:
        assert batch.state_indices is not None
        rolled = replace(batch, state_indices=batch.state_indices.roll(1)) if self.broken else batch
        super().prepare_metadata(rolled)
        batch.attn_metadata = rolled.attn_metadata


class StaleState(Lightning):
    """A request without prefix starts from what its slot's last owner left."""

    def prepare_metadata(self, batch: Batch) -> None:
        prefixed = replace(batch, prefix_lens=tuple(max(1, prefix) for prefix in batch.prefix_lens)) if self.broken else batch
        super().prepare_metadata(prefixed)
        batch.attn_metadata = prefixed.attn_metadata


class LayerZeroSlopes(Lightning):
    """Layer 1 decays as layer 0 does."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        slopes = self.context.slopes
        assert slopes is not None
        right = self.context
        if self.broken:
            self.context = replace(right, slopes=slopes[:1].expand_as(slopes))
        try:
            return super().forward(q, k, v, layer_id, batch)
        finally:
            self.context = right


@dataclass(frozen=True)
class Fault:
    backend: type[Softmax] | type[Lightning]
    cases: tuple[str, ...]  # names in the eager suite
    says: str  # part of the reason
    mode: RunnerMode = RunnerMode.EAGER

    @property
    def kind(self) -> AttentionKind:
        return AttentionKind.SOFTMAX if issubclass(self.backend, Softmax) else AttentionKind.LIGHTNING


FAULTS = (
    Fault(
        TopLeftMask, ("cross_page_boundary.shuffled", "mixed_scratch_hit_decode", "page256_extend", "context4000_extend"), "out of layer 0"
    ),
    Fault(TopLeftMask, ("chain_eagle", "tree_siblings"), "out of layer 0", RunnerMode.VERIFY),
    Fault(LengthOffByOne, ("decode_page_boundary.shuffled", "window16_decode", "context4000_decode"), "out of layer"),
    Fault(WriteSkipped, ("prefix_exact_page.shuffled", "decode_page_boundary.shuffled", "single_token_no_prefix"), "layer 1"),
    Fault(ContiguousPages, ("cross_page_boundary.shuffled", "page1_decode", "context4000_decode", "common_prefix.shared"), "out of layer"),
    Fault(ForeignWrite, ("cross_page_boundary.shuffled", "decode_bsz1_nonzero_prefix.shuffled"), "outside out_loc changed"),
    Fault(LayerZeroRead, ("decode_page_boundary.shuffled", "common_prefix.interleaved", "context1000_extend"), "out of layer 1"),
    Fault(RowNeverWritten, ("ragged_page_boundary.shuffled", "decode_bsz1_nonzero_prefix.shuffled"), "error inf"),
    Fault(LengthsBumpedInPlace, ("ragged_page_boundary.shuffled",), "batch.seq_lens was modified"),
    Fault(LengthsBumpedInPlace, ("tree_siblings",), "batch.seq_lens was modified", RunnerMode.VERIFY),
    Fault(NeighbourState, ("ragged_page_boundary.shuffled", "decode_page_boundary.shuffled", "context4000_decode"), "layer 0"),
    Fault(StaleState, ("zero_prefix_exact_page.shuffled", "mixed_scratch_hit_decode", "single_token_no_prefix"), "layer 0"),
    Fault(LayerZeroSlopes, ("decode_page_boundary.shuffled", "ragged_page_boundary.shuffled", "unit_state_decode"), "layer 1"),
)
TRIED = [pytest.param(fault, name, id=f"{fault.backend.__name__}-{name}") for fault in FAULTS for name in fault.cases]


def run(fault: Fault, name: str, broken: bool) -> CellResult:
    def create(context: Context) -> AttentionBackend:
        return fault.backend(context, broken)

    row = Row(fault.backend.__name__, fault.kind, create, source=__file__)
    return run_cell(row, fault.mode, case_named(name, fault.kind, fault.mode), CPU, controls=(), diagnosed=False)


@pytest.mark.parametrize(("fault", "name"), TRIED)
def test_a_broken_row_is_red(fault: Fault, name: str) -> None:
    result = run(fault, name, broken=True)
    assert result.status == "fail", f"{fault.backend.__doc__} passed: {name}"
    assert any(fault.says in line for line in result.details), result.details
    assert all(trial.error is None for trial in result.trials), "an exception proves nothing"


@pytest.mark.parametrize(("fault", "name"), TRIED)
def test_the_same_row_is_green_with_the_change_off(fault: Fault, name: str) -> None:
    result = run(fault, name, broken=False)
    assert (result.status, result.reason) == ("pass", "")
