"""Sliding windows of the wrong size, in the wrong layers or modes, or from the wrong start."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case, ForwardMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import SPLIT, Plan, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import (
    DECODE,
    EXTEND,
    VERIFY,
    beyond_window,
    branches,
    decodes,
    extends,
    plant,
    requests,
)


class WiderInDecode(SoftmaxSubject):
    def window(self, layer: int, batch: Batch) -> int | None:
        right = super().window(layer, batch)
        return right + 1 if right is not None and batch.forward_mode is ForwardMode.DECODE else right


class WiderInExtend(SoftmaxSubject):
    def window(self, layer: int, batch: Batch) -> int | None:
        right = super().window(layer, batch)
        return right if right is None or batch.forward_mode is ForwardMode.DECODE else right + 1


class Narrower(SoftmaxSubject):
    def window(self, layer: int, batch: Batch) -> int | None:
        right = super().window(layer, batch)
        return None if right is None else right - 1


class WindowOfGroup(SoftmaxSubject):
    def window(self, layer: int, batch: Batch) -> int | None:
        return self.context.windows[0]


class NoWindowInDecode(SoftmaxSubject):
    def window(self, layer: int, batch: Batch) -> int | None:
        return None if batch.forward_mode is ForwardMode.DECODE else super().window(layer, batch)


class NoWindowInVerify(SoftmaxSubject):
    def window(self, layer: int, batch: Batch) -> int | None:
        return None if batch.forward_mode is ForwardMode.TARGET_VERIFY else super().window(layer, batch)


class Ranged(SoftmaxSubject):
    """Windowed layers see the keys from ``self.first`` on, of those that the mask leaves."""

    def visible(self, plan: Plan, rows: Tensor, layer: int, batch: Batch) -> Tensor:
        right = super().visible(plan, rows, layer, batch)
        window = super().window(layer, batch)
        if window is None:
            return right
        return right & (self.key_positions(plan, rows, batch)[:, None, :] >= self.first(plan.positions[rows], window)[..., None])

    def first(self, positions: Tensor, window: int) -> Tensor:
        """int64 ``[R, n]`` from the tokens' positions ``[R, n]``."""
        return positions - window + 1


class PlannedForFullAttention(Ranged):
    """Splits planned over all keys, run from the start of the window: those before it are skipped twice."""

    def first(self, positions: Tensor, window: int) -> Tensor:
        start = super().first(positions, window).clamp(min=0)
        return start + start // SPLIT * SPLIT


class OneStartForBlock(Ranged):
    def first(self, positions: Tensor, window: int) -> Tensor:
        return super().first(positions, window).amax(dim=1, keepdim=True).expand_as(positions)


class FirstKeysForWindow(SoftmaxSubject):
    """As many cached keys as the window holds, but the first ones; no window between the drafts."""

    def visible(self, plan: Plan, rows: Tensor, layer: int, batch: Batch) -> Tensor:
        window = super().window(layer, batch)
        self.off = True
        right = super().visible(plan, rows, layer, batch)
        self.off = False
        if window is None:
            return right
        index, prefix = torch.arange(right.shape[-1], device=rows.device), self.prefix(plan)[:, None]
        return right & ((index < prefix.clamp(max=window)) | (index >= prefix))[:, None, :]

    off = False

    def window(self, layer: int, batch: Batch) -> int | None:
        return None if self.off else super().window(layer, batch)


class FlatDraftIndex(SoftmaxSubject):
    """The window's edge from the index of a draft token instead of its depth in the tree."""

    def query_positions(self, batch: Batch) -> Tensor:
        widths = batch.cu_seqlens_q.diff()
        index = torch.arange(batch.num_tokens, device=widths.device)
        row = torch.searchsorted(batch.cu_seqlens_q[1:].contiguous(), index, right=True)
        return (batch.seq_lens - batch.cu_seqlens_q[:-1])[row] + index


class PoolOfWindow(SoftmaxSubject):
    """Windowed layers look their pages up in the coordinates of another pool."""

    def slots(self, plan: Plan, layer: int, batch: Batch) -> Tensor:
        right, kv, size = super().slots(plan, layer, batch), self.context.kv, self.context.page_size
        assert kv is not None
        return right if self.context.windows[layer] is None else (kv.num_pages - 1 - right // size) * size + right % size


def _planned_apart(case: Case) -> bool:
    return case.window is not None and any(prefix + new - case.window >= SPLIT for prefix, new in requests(case))


def _prefix_beyond(case: Case) -> bool:
    return case.window is not None and max(case.prefix_lens) > case.window


plant("B75", "a window one key larger in decode", WiderInDecode, lambda case: beyond_window(case) and decodes(case), DECODE)
plant("B76", "layer 0's window applied to every layer", WindowOfGroup,
      lambda case: case.window_layers == "first" and beyond_window(case))  # fmt: skip
plant("B77", "splits planned for full attention and run inside the window", PlannedForFullAttention, _planned_apart)
plant("B78", "the window filled with the first cached keys", FirstKeysForWindow, _prefix_beyond, VERIFY)
plant("B79", "the window of the last draft token applied to all", OneStartForBlock, _prefix_beyond, VERIFY)
plant("B80", "windowed layers' pages looked up in another pool's coordinates", PoolOfWindow, lambda case: case.window is not None, VERIFY)
plant("B82", "no window in decode", NoWindowInDecode, lambda case: beyond_window(case) and decodes(case), DECODE)
plant("X33", "a window one key larger in extend", WiderInExtend, lambda case: beyond_window(case) and extends(case), EXTEND,
      kind="window", title="Window one key larger in extend")  # fmt: skip
plant("X34", "a window one key smaller", Narrower, lambda case: case.window is not None and max(case.kv_lens) >= case.window,
      kind="window", title="Window one key smaller")  # fmt: skip
plant("X35", "the window's edge counted by the index of a draft token, not its depth", FlatDraftIndex,
      lambda case: _prefix_beyond(case) and branches(case), VERIFY, kind="window", title="Window edge by flat draft index")  # fmt: skip
plant("X70", "no window in verify", NoWindowInVerify, beyond_window, VERIFY, kind="window", title="Window dropped in verify")
