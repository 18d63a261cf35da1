"""Faults that wait for a shape: a long batch, many heads, a long query, a far position, an option in a rare mode."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case, ForwardMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.heads import Mapped
from attnmatrix.harness.faults.softmax_subject import Partial, Plan, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import ALL, VERIFY, always, beyond_window, branches, plant, requests, splits, used_pages

REQUESTS, HEADS, TILE, FAR, BYTE = 8, 32, 256, 8192, 128
ROUNDED_LOG2E = 1.44 / 1.4426950408889634


class LateRequestsReadFirst(SoftmaxSubject):
    def page_table(self, batch: Batch) -> Tensor:
        table = super().page_table(batch).clone()
        table[REQUESTS:] = table[:1]
        return table


class LateHeadsReadFirst(Mapped):
    def head(self, index: Tensor) -> Tensor:
        return torch.where(index < HEADS, super().head(index), 0)


class LateTilesRestart(SoftmaxSubject):
    """The causal edge of a query tile counted from the first tile."""

    def ordered(self, draft: Tensor, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        right = super().ordered(draft, plan, rows, batch)
        token = torch.arange(rows.shape[1], device=rows.device) % TILE
        return right & (draft[:, None, :] <= token[None, :, None])


class FarKeysDropped(SoftmaxSubject):
    def visible(self, plan: Plan, rows: Tensor, layer: int, batch: Batch) -> Tensor:
        right = super().visible(plan, rows, layer, batch)
        index = torch.arange(right.shape[-1], device=rows.device)
        edge = (plan.cache_seqlens - FAR)[:, None].clamp(min=0)
        return right & (index[None, :] >= edge)[:, None, :]


class OneKeyOfMany(SoftmaxSubject):
    """Key 777 of more than 900 left out, as by a split that ends one key early."""

    def visible(self, plan: Plan, rows: Tensor, layer: int, batch: Batch) -> Tensor:
        right = super().visible(plan, rows, layer, batch)
        index = torch.arange(right.shape[-1], device=rows.device)
        return right & ((index[None, :] != 777) | (plan.cache_seqlens[:, None] <= 900))[:, None, :]


class NoSinksInVerify(SoftmaxSubject):
    def sink(self) -> Tensor | None:
        return None if self.context.forward_mode is ForwardMode.TARGET_VERIFY else super().sink()


class NoCapInVerify(SoftmaxSubject):
    def scores(self, queries: Tensor, keys: Tensor, plan: Plan, rows: Tensor, layer: int, batch: Batch) -> Tensor:
        if self.context.soft_cap is None or batch.forward_mode is not ForwardMode.TARGET_VERIFY:
            return super().scores(queries, keys, plan, rows, layer, batch)
        return torch.einsum("rnhd,rlhd->rhnl", queries.float(), self.expand(keys.float())) * self.scale(layer)


class NoTreeWithoutPrefix(SoftmaxSubject):
    """A verify row without cached tokens goes the causal way of a plain prefill."""

    def ordered(self, draft: Tensor, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        token = torch.arange(rows.shape[1], device=rows.device)
        causal = draft[:, None, :] <= token[None, :, None]
        return torch.where((self.prefix(plan) == 0)[:, None, None], causal, super().ordered(draft, plan, rows, batch))


class LongVerifyPrefixCut(SoftmaxSubject):
    """The draft mask is packed for a prefix of at most ``TILE`` tokens; those before are masked."""

    def ordered(self, draft: Tensor, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        right = super().ordered(draft, plan, rows, batch)
        return right & (draft >= -TILE)[:, None, :] if batch.forward_mode is ForwardMode.TARGET_VERIFY else right


class NoMaximum(SoftmaxSubject):
    """exp of the scores themselves."""

    def partial(self, scores: Tensor, visible: Tensor, values: Tensor) -> Partial:
        part = super().partial(scores, visible, values)
        total = torch.exp(scores.masked_fill(~visible[:, None], float("-inf"))).sum(dim=-1).transpose(1, 2)
        return Partial(part.out.masked_fill(torch.isinf(total)[..., None], float("nan")), part.lse)


class DistanceInBf16(SoftmaxSubject):
    def key_positions(self, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        right = super().key_positions(plan, rows, batch)
        return right if self.context.alibi_slopes is None else right.bfloat16().long()


class LseInBf16(SoftmaxSubject):
    def partial(self, scores: Tensor, visible: Tensor, values: Tensor) -> Partial:
        part = super().partial(scores, visible, values)
        return Partial(part.out, part.lse.bfloat16().float())


class Log2eRounded(SoftmaxSubject):
    def scale(self, layer: int) -> float:
        return self.context.scale * ROUNDED_LOG2E


class PageInByte(SoftmaxSubject):
    def page_table(self, batch: Batch) -> Tensor:
        return super().page_table(batch) % BYTE


class WindowInPages(SoftmaxSubject):
    """Windows rounded up to whole pages."""

    def window(self, layer: int, batch: Batch) -> int | None:
        right, size = super().window(layer, batch), self.context.page_size
        return None if right is None else -(-right // size) * size


def _verifies(case: Case) -> bool:
    return case.forward is ForwardMode.TARGET_VERIFY


def _longest(case: Case) -> int:
    return max((prefix + new for prefix, new in requests(case)), default=0)


def _loud(case: Case) -> bool:
    return case.gain > 1 and case.soft_cap is None


plant("X54", f"requests from the {REQUESTS}th on reading the first one's pages", LateRequestsReadFirst,
      lambda case: case.batch_size > REQUESTS, kind="page-index", title="Requests beyond a fixed number share a table row")  # fmt: skip
plant("X55", f"query heads from {HEADS} on reading key/value head 0", LateHeadsReadFirst, lambda case: case.heads.q > HEADS,
      kind="head-map", title="Head index cut to five bits")  # fmt: skip
plant("X56", f"the causal edge counted anew every {TILE} query rows", LateTilesRestart, lambda case: max(case.new_lens) > TILE,
      kind="causal-align", title="Causal edge of later query tiles")  # fmt: skip
plant("X57", f"all but the last {FAR} keys dropped", FarKeysDropped, lambda case: _longest(case) > FAR, kind="kv-length",
      title="Context cut at a fixed length")  # fmt: skip
plant("X110", "one key left out of contexts of more than 900", OneKeyOfMany, lambda case: _longest(case) > 900, kind="kv-length",
      title="Split ends one key early")  # fmt: skip
plant("X58", "the sinks left out in verify", NoSinksInVerify, lambda case: case.sinks, VERIFY, kind="score-mod",
      title="Sinks dropped in verify")  # fmt: skip
plant("X60", "the soft cap left out in verify", NoCapInVerify, lambda case: case.soft_cap is not None, VERIFY, kind="score-mod",
      title="Soft cap dropped in verify")  # fmt: skip
plant("X61", "the draft tree of a request without prefix taken for a chain", NoTreeWithoutPrefix,
      lambda case: branches(case) and 0 in case.prefix_lens, VERIFY, kind="mask-pack", title="Tree without a prefix")  # fmt: skip
plant("X62", f"cached keys more than {TILE} before the drafts masked in verify", LongVerifyPrefixCut,
      lambda case: _verifies(case) and max(case.prefix_lens) > TILE, VERIFY, kind="mask-pack", title="Draft mask narrower than the prefix")  # fmt: skip
plant("X63", "softmax without its maximum subtracted", NoMaximum, _loud, kind="overflow", title="Exponential overflows")
plant("X64", "ALiBi distances from positions rounded to bf16", DistanceInBf16, lambda case: case.alibi and _longest(case) > 257,
      kind="score-mod", title="Positions in bf16")  # fmt: skip
plant("X65", "the LSE of a split rounded to bf16", LseInBf16, splits, kind="split-merge", title="LSE stored in bf16")
plant("X66", "log2(e) taken for 1.44", Log2eRounded, lambda case: max(case.kv_lens) > 1, kind="score-mod", title="log2(e) rounded")
plant("X67", f"page ids modulo {BYTE}", PageInByte, always, kind="int-overflow", title="Page id in a signed byte",
      also=lambda case, mode: max(used_pages(case, mode), default=0) >= BYTE)  # fmt: skip
plant("X68", "the window rounded up to whole pages", WindowInPages,
      lambda case: beyond_window(case) and (case.window or 0) % case.page_size != 0, ALL, kind="window", title="Window in whole pages")  # fmt: skip
