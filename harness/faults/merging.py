"""Splits over the keys merged wrongly: LSE in the wrong base or scale, empty splits, sinks, rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import SPLIT, Partial, Plan, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import (
    DECODE,
    EAGER,
    PIECEWISE,
    UNPADDED,
    VERIFY,
    decodes,
    plant,
    requests,
    splits,
)

SHARDS = (3, 7, 14)  # where the shards of a sequence end, but for the last
LOG2E = math.log2(math.e)


class BaseTwo(SoftmaxSubject):
    def merge(self, parts: Sequence[Partial]) -> Tensor:
        return super().merge([replace(part, lse=part.lse * LOG2E) for part in parts])


class ShardsInBaseTwo(BaseTwo):
    """Uneven shards, each right by itself, combined as if their base-2 LSE were natural."""

    def attend(self, scores: Tensor, visible: Tensor, values: Tensor, layer: int, batch: Batch) -> Tensor:
        wide, length = self.expand(values.float()), scores.shape[-1]
        bounds = [0, *(end for end in SHARDS if end < length), length]
        cuts = [slice(start, stop) for start, stop in pairwise(bounds)]
        return self.merge([self.partial(scores[..., cut], visible[..., cut], wide[:, cut]) for cut in cuts])


class DenseOffsets(SoftmaxSubject):
    """A request without keys in a split writes its -inf at dense offsets into the packed LSE."""

    def attend(self, scores: Tensor, visible: Tensor, values: Tensor, layer: int, batch: Batch) -> Tensor:
        starts, widest = batch.attn_metadata.cu_seqlens_q.long()[:-1, None], scores.shape[2]
        packed = starts + torch.arange(widest, device=scores.device)
        self.owner = (packed // widest).clamp(max=len(starts) - 1)
        return super().attend(scores, visible, values, layer, batch)

    def merge(self, parts: Sequence[Partial]) -> Tensor:
        return super().merge([self._overwritten(part) for part in parts])

    def _overwritten(self, part: Partial) -> Partial:
        empty = torch.isneginf(part.lse).all(dim=2).all(dim=1)
        return Partial(part.out, part.lse.masked_fill(empty[self.owner][..., None], float("-inf")))


class EmptyLeftUnwritten(SoftmaxSubject):
    def partial(self, scores: Tensor, visible: Tensor, values: Tensor) -> Partial:
        part = super().partial(scores, visible, values)
        return Partial(torch.where(torch.isneginf(part.lse)[..., None], torch.empty_like(part.out), part.out), part.lse)


class MaximumScaledTwice(SoftmaxSubject):
    def partial(self, scores: Tensor, visible: Tensor, values: Tensor) -> Partial:
        part = super().partial(scores, visible, values)
        peak = scores.masked_fill(~visible[:, None], float("-inf")).amax(dim=-1).transpose(1, 2)
        more = torch.where(torch.isfinite(peak), peak * (self.context.scale - 1), 0.0)
        return Partial(part.out, part.lse + more)


class OneRowPerRequest(SoftmaxSubject):
    """The merge writes request r from row r on when it has more than four tokens; other rows stay unwritten."""

    def scatter(self, out: Tensor, rows: Tensor, present: Tensor, q: Tensor) -> Tensor:
        if out.shape[1] <= 4:
            return super().scatter(out, rows, present, q)
        first = torch.arange(len(rows), device=rows.device)[:, None] + torch.arange(rows.shape[1], device=rows.device)
        written = super().scatter(out, first.clamp(max=len(q) - 1), present, q)
        reached = torch.arange(len(q), device=q.device) < len(rows) - 1 + rows.shape[1]
        return torch.where(reached[:, None, None], written, torch.empty_like(q, memory_format=torch.contiguous_format))


class UnmergedScratch(SoftmaxSubject):
    """Scratch for the partial sums with half the head dim in layer 1: each head's second half is the next head's first."""

    def attend(self, scores: Tensor, visible: Tensor, values: Tensor, layer: int, batch: Batch) -> Tensor:
        self.layer = layer
        return super().attend(scores, visible, values, layer, batch)

    def merge(self, parts: Sequence[Partial]) -> Tensor:
        return super().merge([self._overlapped(part) for part in parts] if self.layer and len(parts) > 1 else parts)

    def _overlapped(self, part: Partial) -> Partial:
        half = part.out.shape[-1] // 2
        following = torch.cat([part.out[:, :, 1:, :half], part.out[:, :, -1:, -half:]], dim=2)
        return Partial(torch.cat([part.out[..., : part.out.shape[-1] - half], following], dim=-1), part.lse)


class LastRowUnwritten(SoftmaxSubject):
    def scatter(self, out: Tensor, rows: Tensor, present: Tensor, q: Tensor) -> Tensor:
        written = super().scatter(out, rows, present, q)
        return torch.cat([written[:-1], torch.empty_like(written[-1:])])


class AccumulatedInInputDtype(SoftmaxSubject):
    """The running sum of P times V rounded to the input dtype after each split."""

    def merge(self, parts: Sequence[Partial]) -> Tensor:
        lses = torch.stack([part.lse for part in parts])
        total = torch.logsumexp(lses, dim=0)
        weight = torch.exp(lses - torch.where(torch.isfinite(total), total, 0.0))
        running = torch.zeros_like(parts[0].out)
        for share, part in zip(weight, parts, strict=True):
            running = (running + share[..., None] * part.out).to(self.context.dtype).float()
        return running


class OddGroupsInInputDtype(AccumulatedInInputDtype):
    """So for groups that are not a power of two."""

    def merge(self, parts: Sequence[Partial]) -> Tensor:
        group = self.context.heads.group
        return super().merge(parts) if group & (group - 1) else SoftmaxSubject.merge(self, parts)


class TokensOfFirst(SoftmaxSubject):
    """As many query rows per request as the first one has."""

    def rows(self, plan: Plan, batch: Batch) -> tuple[Tensor, Tensor]:
        rows, present = super().rows(plan, batch)
        return rows, present & (torch.arange(rows.shape[1], device=rows.device) < max(1, plan.new_lens[0]))


def empty_split(case: Case) -> bool:
    """A token that sees no key of a split that the table holds."""
    length = -(-max(case.kv_lens) // case.page_size) * case.page_size
    return any(prefix < (length - 1) // SPLIT * SPLIT for prefix, _ in requests(case))


def _overwrites_another(case: Case) -> bool:
    """A request without keys in a split whose dense rows hold tokens of another that has some there."""
    widest = max(case.new_lens)
    owners = [(request, row // widest) for request, row in last_rows(case) if row // widest < case.batch_size]
    reach = [(length - 1) // SPLIT for length in case.kv_lens]
    return case.window is None and any(reach[owner] < reach[request] and owner != request for request, owner in owners)


def last_rows(case: Case) -> list[tuple[int, int]]:
    """The last packed row of each request with a token."""
    ends = list(accumulate(case.new_lens))
    return [(request, end - 1) for request, end in enumerate(ends) if case.new_lens[request]]


def _many_rows(case: Case) -> bool:
    return case.batch_size > 1 and len(set(case.new_lens)) == 1 and case.new_lens[0] > 4


def _more_than_first(case: Case) -> bool:
    return any(new > max(1, case.new_lens[0]) for new in case.new_lens)


plant("B51", "base-2 LSE merged as if it were natural", BaseTwo, splits, like=("B52", "B57"))
plant("B52", "the base-2 LSE of uneven shards combined as if it were natural", ShardsInBaseTwo,
      lambda case: decodes(case) and splits(case), DECODE, like=("B51", "B57"))  # fmt: skip
plant("B54", "the -inf of a request without keys in a split written over another's LSE", DenseOffsets, _overwrites_another,
      UNPADDED)  # fmt: skip
plant("B55", "the output of an empty split left unwritten and merged", EmptyLeftUnwritten, empty_split, like=("B95", "B96"))
plant("B57", "the row maximum scaled twice in the LSE of a split", MaximumScaledTwice, splits, like=("B51", "B52"))
plant("B09", "the merged rows of request r written from row r on", OneRowPerRequest, lambda case: _many_rows(case) and splits(case),
      (*EAGER, *PIECEWISE, *VERIFY))  # fmt: skip
plant("B22", "scratch for partial sums of half the head dim in layer 1", UnmergedScratch, splits)
plant("X18", "the output row of the last token unwritten", LastRowUnwritten, lambda case: True, UNPADDED,
      kind="split-merge", title="Last output row not written")  # fmt: skip
plant("X19", "P times V accumulated in the input dtype", AccumulatedInInputDtype,
      lambda case: case.dtype != "fp32" and max(case.kv_lens) >= 1000 and not case.sinks,
      kind="accumulation", title="P times V accumulated in the input dtype over a long context")  # fmt: skip
plant("B143", "P times V accumulated in the input dtype for groups that are not a power of two", OddGroupsInInputDtype,
      lambda case: case.dtype != "fp32" and case.heads.group & (case.heads.group - 1) != 0 and max(case.kv_lens) >= 1000,
      like=("X19",))  # fmt: skip
plant("X20", "only as many tokens of each request computed as the first has", TokensOfFirst, _more_than_first, UNPADDED,
      kind="batch-order", title="Longest query taken from the first request")  # fmt: skip
