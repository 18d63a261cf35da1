"""New keys and values written to the wrong place, too late, or not at all."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case, Placement
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.faults.softmax_subject import Plan, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import (
    EXTEND,
    PIECEWISE,
    UNPADDED,
    VERIFY,
    always,
    beyond_window,
    layout,
    plant,
    several_tokens,
)

WRAP = 32  # slots after which a row index wraps
INTERLEAVED = Conventions(kv_layout="interleaved")


class Writer(SoftmaxSubject):
    """Writes to other slots than ``out_loc``."""

    def write(self, k: Tensor, v: Tensor, layer: int, batch: Batch) -> None:
        assert self.context.kv is not None
        self.context.kv.store(layer, self.target(batch, layer), k, v)

    def target(self, batch: Batch, layer: int) -> Tensor:
        """int64 ``[T]``."""
        return batch.out_loc

    @property
    def num_slots(self) -> int:
        assert self.context.kv is not None
        return self.context.kv.num_slots


class SlotOfPosition(Writer):
    def target(self, batch: Batch, layer: int) -> Tensor:
        plan, size = batch.attn_metadata, self.context.page_size
        row = torch.searchsorted(
            plan.cu_seqlens_q[1:].contiguous(), torch.arange(len(batch.out_loc), device=batch.out_loc.device), right=True
        )
        return plan.page_table[row, batch.positions // size] * size + batch.positions % size


class StridesFromShape(SoftmaxSubject):
    def write(self, k: Tensor, v: Tensor, layer: int, batch: Batch) -> None:
        kv = self.context.kv
        assert kv is not None
        page, offset = batch.out_loc // kv.page_size, batch.out_loc % kv.page_size
        for pool, held in zip((kv.k(layer), kv.v(layer)), kv.as_held(layer, k, v), strict=True):
            packed = torch.as_strided(pool, pool.shape, torch.empty(pool.shape, device="meta").stride(), pool.storage_offset())
            packed[page, offset] = held


class WriteAfterRead(SoftmaxSubject):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        out = super().forward(q, k, v, layer_id, batch)
        super().write(k, v, layer_id, batch)
        return out

    def write(self, k: Tensor, v: Tensor, layer: int, batch: Batch) -> None:
        pass


class RowWraps(Writer):
    def target(self, batch: Batch, layer: int) -> Tensor:
        return batch.out_loc % WRAP


class LastTokenNextSlot(Writer):
    def target(self, batch: Batch, layer: int) -> Tensor:
        last = torch.arange(len(batch.out_loc), device=batch.out_loc.device) == len(batch.out_loc) - 1
        return torch.where(last, (batch.out_loc + 1) % self.num_slots, batch.out_loc)


class SlotsSorted(Writer):
    def target(self, batch: Batch, layer: int) -> Tensor:
        return batch.out_loc.sort().values


class LayerZeroWritten(Writer):
    def write(self, k: Tensor, v: Tensor, layer: int, batch: Batch) -> None:
        super().write(k, v, 0, batch)


class LastValueNotWritten(SoftmaxSubject):
    def write(self, k: Tensor, v: Tensor, layer: int, batch: Batch) -> None:
        kv = self.context.kv
        assert kv is not None
        page, offset = batch.out_loc // kv.page_size, batch.out_loc % kv.page_size
        kept = kv.by_page(kv.v(layer))[page[-1:], offset[-1:]].float() * self.context.v_scale(layer)
        super().write(k, torch.cat([v[:-1], kept.to(v.dtype)]), layer, batch)


class PhantomTokens(Writer):
    """Positions of a padded batch: one more token at position 0 of the last request claims a slot."""

    def write(self, k: Tensor, v: Tensor, layer: int, batch: Batch) -> None:
        plan: Plan = batch.attn_metadata
        super().write(k, v, layer, batch)
        if batch.prefix_lens[-1] and self.context.kv is not None:
            phantom = plan.page_table[-1:, 0] * self.context.page_size
            self.context.kv.store(layer, phantom, k[-1:], v[-1:])


class PaddedWindowSlots(Writer):
    """Windowed layers keep a slot list of padded length and cut it from the wrong end."""

    def target(self, batch: Batch, layer: int) -> Tensor:
        if self.context.windows[layer] is None:
            return batch.out_loc
        return torch.cat([batch.out_loc, batch.out_loc[-1:]])[1:]


def _wraps(case: Case, mode: RunnerMode) -> bool:
    pool = layout(case, mode)
    return pool.num_pages * pool.page_size > WRAP


def _unsorted(case: Case) -> bool:
    return case.placement is not Placement.CONTIGUOUS and max(case.kv_lens) > case.page_size


def _falls(case: Case, mode: RunnerMode) -> bool:
    """Whether the first batch's new slots do not ascend."""
    pool = layout(case, mode)
    slots = [pool.slot(r, p + i) for r, (p, n) in enumerate(zip(case.prefix_lens, case.new_lens, strict=True)) for i in range(n)]
    return slots != sorted(slots)


plant("B33", "the slot of a draft token derived from its position", SlotOfPosition,
      lambda case: any(len(set(case.depths(r))) < new for r, new in enumerate(case.new_lens)), (RunnerMode.VERIFY,))  # fmt: skip
plant("B34", "keys and values written as if each had a buffer of its own", StridesFromShape, always, conventions=INTERLEAVED)
plant("B35", "keys and values written after the attention", WriteAfterRead, always)
plant("B36", f"slots beyond {WRAP} written modulo {WRAP}", RowWraps, always, also=_wraps)
plant("B47", "a phantom token written over the first of the last request", PhantomTokens, lambda case: case.prefix_lens[-1] > 0,
      PIECEWISE)  # fmt: skip
plant("B48", "windowed layers' slots taken from the wrong end of a padded list", PaddedWindowSlots,
      lambda case: beyond_window(case) and case.num_tokens > 1, PIECEWISE)  # fmt: skip
plant("X14", "the last token written one slot further", LastTokenNextSlot, always, UNPADDED, kind="kv-write",
      title="Write into the neighbour's slot")  # fmt: skip
plant("X15", "the slots of the new tokens taken in ascending order", SlotsSorted, lambda case: several_tokens(case) and _unsorted(case),
      (*EXTEND, *VERIFY), kind="kv-write", title="New slots assumed monotonic", also=_falls)  # fmt: skip
plant("X16", "layer 1's keys and values written to layer 0", LayerZeroWritten, always, kind="kv-write", title="Layer 0 written for layer 1")
plant("X17", "the last token's value not written", LastValueNotWritten, always, UNPADDED, kind="kv-write", title="Last value not written")
