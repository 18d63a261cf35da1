"""Causal masks that are aligned, bounded or cut wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import Plan, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import PLAIN, VERIFY, Rule, branches, extends, has_prefix, plant, requests, several_tokens

BLOCK = 16  # keys that a block mask decides about at once


class TopLeft(SoftmaxSubject):
    def ordered(self, draft: Tensor, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        index = draft + self.prefix(plan)[:, None]
        return index[:, None, :] <= torch.arange(rows.shape[1], device=rows.device)[None, :, None]


class TopLeftOverCapacity(TopLeft):
    """A single query gets no mask at all, several get one that starts at the first key; either way over the whole table row."""

    def page_table(self, batch: Batch) -> Tensor:
        size = self.context.page_size
        return self.context.req_to_token[batch.req_pool_indices, ::size].long() // size

    def key_limit(self, plan: Plan, batch: Batch) -> Tensor:
        return torch.full_like(plan.cache_seqlens, plan.page_table.shape[1] * self.context.page_size)

    def ordered(self, draft: Tensor, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        single = plan.cu_seqlens_q.diff() == 1
        return super().ordered(draft, plan, rows, batch) | single[:, None, None]


class TopLeftForSeveral(TopLeft):
    """A single query sees all keys, as it should."""

    def ordered(self, draft: Tensor, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        single = plan.cu_seqlens_q.diff() == 1
        return torch.where(
            single[:, None, None], SoftmaxSubject.ordered(self, draft, plan, rows, batch), super().ordered(draft, plan, rows, batch)
        )


class EdgeRoundedUp(SoftmaxSubject):
    """The causal edge of a token rounded up to the next block, no mask inside it; for requests of at most ``tokens`` tokens."""

    tokens = 1 << 30

    def ordered(self, draft: Tensor, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        right = super().ordered(draft, plan, rows, batch)
        prefix = self.prefix(plan)[:, None]
        own = prefix + torch.arange(rows.shape[1], device=rows.device)
        edge = (own + BLOCK) // BLOCK * BLOCK
        short = plan.cu_seqlens_q.diff() <= self.tokens
        return right | (((draft + prefix)[:, None, :] < edge[..., None]) & short[:, None, None])


class EdgeRoundedUpForFew(EdgeRoundedUp):
    tokens = BLOCK - 1


class NoCausalMask(SoftmaxSubject):
    def ordered(self, draft: Tensor, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        return torch.ones_like(super().ordered(draft, plan, rows, batch))


class SeesNext(SoftmaxSubject):
    def ordered(self, draft: Tensor, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        return super().ordered(draft - 1, plan, rows, batch)


class OwnKeyHidden(SoftmaxSubject):
    def ordered(self, draft: Tensor, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        own = draft[:, None, :] == torch.arange(rows.shape[1], device=rows.device)[None, :, None]
        return super().ordered(draft, plan, rows, batch) & ~own


def _edge_inside_block(most: int) -> Rule:
    """A token whose causal edge rounds up to a later new token of its request."""

    def rule(case: Case) -> bool:
        return any(new <= most and any((prefix + token + 1) % BLOCK for token in range(new - 1)) for prefix, new in requests(case))

    return rule


def _prefix_before_several(case: Case) -> bool:
    return any(prefix and new > 1 for prefix, new in requests(case))


def _first_key_elsewhere(case: Case) -> bool:
    return has_prefix(case) or any(new == 1 for _, new in requests(case))


plant("B03", "the mask of a single query dropped and that of several aligned top-left, over the capacity of the cache",
      TopLeftOverCapacity, _first_key_elsewhere, PLAIN, like=("B04", "X07"))  # fmt: skip
plant("B04", "the causal mask aligned top-left", TopLeft, has_prefix, PLAIN, like=("B03", "Y80"))
plant("B05", f"the causal edge of requests with fewer than {BLOCK} new tokens rounded up to a block of {BLOCK} keys",
      EdgeRoundedUpForFew, _edge_inside_block(BLOCK - 1), like=("B88", "B87", "B89", "X01"))  # fmt: skip
plant("B88", f"the causal edge rounded up to a block of {BLOCK} keys", EdgeRoundedUp, _edge_inside_block(1 << 30),
      like=("B05", "B87", "B89", "X01"))  # fmt: skip
plant("B87", "no mask between the draft tokens of a request", NoCausalMask, several_tokens, VERIFY, like=("B05", "B88", "X01"))
plant("B89", "no mask between the new tokens of a request", NoCausalMask,
      lambda case: extends(case) and several_tokens(case), PLAIN, like=("B05", "B88", "X01"))  # fmt: skip
plant("X01", "the causal mask one key too long: each token sees the next one", SeesNext,
      lambda case: several_tokens(case) or branches(case), kind="causal-align", title="Causal mask shifted by one key",
      like=("B05", "B87", "B88", "B89"))  # fmt: skip
plant("X02", "each token's own key hidden", OwnKeyHidden, lambda case: True, kind="causal-align", title="Strictly causal mask")
plant("Y80", "the causal mask of requests with several new tokens aligned top-left", TopLeftForSeveral, _prefix_before_several,
      (*PLAIN, *VERIFY), kind="causal-align", title="Causal mask aligned top-left but for single queries", like=("B03", "B04"))  # fmt: skip
