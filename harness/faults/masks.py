"""Draft masks packed with one stride or offset and read with another, or left from the round before."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.graphs import LeavesBehind
from attnmatrix.harness.faults.softmax_subject import Plan, SoftmaxSubject, edited
from attnmatrix.harness.faults.softmax_where import VERIFY, branches, plant, ragged, several_tokens, uneven


class Repacked(SoftmaxSubject):
    """The mask of a verify batch as one flat list of bits, packed right and read by ``bit``."""

    def plan(self, batch: Batch) -> Plan:
        plan = super().plan(batch)
        if plan.ancestors is None:
            return plan
        flat = self.packed(batch, plan.ancestors)
        read = torch.zeros_like(plan.ancestors)
        start = 0
        for row, new in enumerate(batch.new_lens):
            token, draft = torch.arange(new)[:, None], torch.arange(new)[None, :]
            read[start : start + new, :new] = flat[self.bit(batch, row, token, draft) % len(flat)]
            start += new
        return edited(plan, ancestors=read)

    def packed(self, batch: Batch, ancestors: Tensor) -> Tensor:
        """bool ``[bits]``: per request its tokens' rows, each over all its keys."""
        rows, start = [], 0
        for prefix, new in zip(batch.prefix_lens, batch.new_lens, strict=True):
            seen = ancestors[start : start + new, :new]
            rows.append(torch.cat([seen.new_ones(new, prefix), seen], dim=1).flatten())
            start += new
        return torch.cat(rows)

    def bit(self, batch: Batch, row: int, token: Tensor, draft: Tensor) -> Tensor:
        """int64 ``[new, new]``: where the bit of a token and a draft key lies."""
        before = sum(new * length for new, length in zip(batch.new_lens[:row], batch.kv_lens[:row], strict=True))
        return before + token * batch.kv_lens[row] + batch.prefix_lens[row] + draft


class OffsetsOfPadded(Repacked):
    def bit(self, batch: Batch, row: int, token: Tensor, draft: Tensor) -> Tensor:
        before = row * max(batch.new_lens) * max(batch.kv_lens)
        return before + token * batch.kv_lens[row] + batch.prefix_lens[row] + draft


class OwnRowWidth(Repacked):
    """Rows packed as wide as the longest request's draft, read as wide as the own."""

    def packed(self, batch: Batch, ancestors: Tensor) -> Tensor:
        return ancestors.flatten()

    def bit(self, batch: Batch, row: int, token: Tensor, draft: Tensor) -> Tensor:
        return sum(batch.new_lens[:row]) * max(batch.new_lens) + token * batch.new_lens[row] + draft


class Chain(SoftmaxSubject):
    def plan(self, batch: Batch) -> Plan:
        plan = super().plan(batch)
        if plan.ancestors is None:
            return plan
        widest = plan.ancestors.shape[1]
        chains = [torch.ones(new, widest, dtype=torch.bool, device=plan.ancestors.device).tril() for new in batch.new_lens]
        return edited(plan, ancestors=torch.cat(chains))


class ParentsOnly(SoftmaxSubject):
    """A draft token sees itself and its parent, not the ancestors before."""

    def plan(self, batch: Batch) -> Plan:
        plan = super().plan(batch)
        if plan.ancestors is None or batch.drafts is None:
            return plan
        seen, start = torch.zeros_like(plan.ancestors), 0
        for tree in batch.drafts.trees:
            for node, parent in enumerate(tree):
                seen[start + node, [node, max(parent, 0)] if parent >= 0 else [node]] = True
            start += len(tree)
        return edited(plan, ancestors=seen)


class LinksOfLastRound(LeavesBehind):
    """The captured links are filled with those of the round before."""

    def prepare_for_replay(self, batch: Batch) -> None:
        fresh: Plan = batch.attn_metadata
        before = self.left.get(batch.padded_reqs, self.captured[batch.padded_reqs])
        self.left[batch.padded_reqs] = edited(fresh, ancestors=None if fresh.ancestors is None else fresh.ancestors.clone())
        if before.ancestors is not None:
            batch.attn_metadata = edited(fresh, ancestors=before.ancestors.clone())
        super().prepare_for_replay(batch)


def _grandchildren(case: Case) -> bool:
    return any(max(case.depths(request), default=0) >= 2 for request in range(case.batch_size))


plant("B83", "the mask read at the offsets of padded lengths", OffsetsOfPadded, lambda case: ragged(case) and several_tokens(case), VERIFY)
plant("B85", "a mask row as wide as the request's own draft", OwnRowWidth, lambda case: uneven(case) and several_tokens(case), VERIFY)
plant("B93", "the tree links of the round before", LinksOfLastRound, branches, VERIFY[1:])
plant("X36", "the draft tree taken for a chain", Chain, branches, VERIFY, kind="mask-pack", title="Tree verified as a chain")
plant("X37", "a draft token seeing its parent but no earlier ancestor", ParentsOnly, _grandchildren, VERIFY, kind="mask-pack",
      title="Mask of parents instead of ancestors")  # fmt: skip
