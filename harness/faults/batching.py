"""Rows of a batch in the wrong order, positions off by one, results that depend on neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case, ForwardMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import SPLIT, Partial, Plan, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import (
    ALL,
    DECODE,
    EAGER,
    EXTEND,
    UNPADDED,
    VERIFY,
    always,
    extends,
    plant,
    ragged,
    several_requests,
)


class StartsPermuted(SoftmaxSubject):
    def query_starts(self, batch: Batch) -> Tensor:
        lens = batch.cu_seqlens_q.diff().flip(0)
        return torch.cat([batch.cu_seqlens_q[:1], lens.cumsum(0).int()])


class PositionsAhead(SoftmaxSubject):
    """Positions of draft tokens and of decode are added to once too often."""

    def query_positions(self, batch: Batch) -> Tensor:
        ahead = batch.forward_mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
        return batch.positions + 1 if ahead else batch.positions


class PositionsRestart(SoftmaxSubject):
    """Positions of new tokens counted from 0 in extend."""

    def query_positions(self, batch: Batch) -> Tensor:
        if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
            return batch.positions
        index = torch.arange(len(batch.positions), device=batch.positions.device)
        row = torch.searchsorted(batch.cu_seqlens_q[1:].contiguous(), index, right=True)
        return index - batch.cu_seqlens_q[row]


class LastIndicesShifted(SoftmaxSubject):
    """``get_last_indices`` names the row behind each request's last one."""

    def plan(self, batch: Batch) -> Plan:
        plan = super().plan(batch)
        return _Shifted(plan.cu_seqlens_q, plan.cache_seqlens, plan.page_table, plan.positions, plan.ancestors, plan.new_lens)


class _Shifted(Plan):
    def get_last_indices(self, bs: int) -> Tensor:
        return self.cu_seqlens_q[1 : bs + 1]


class DecodeStarts(SoftmaxSubject):
    """The path for pure decode, chosen because the last request has one new token."""

    def query_starts(self, batch: Batch) -> Tensor:
        right = batch.cu_seqlens_q
        return torch.arange(len(right), dtype=right.dtype, device=right.device) if batch.new_lens[-1:] == (1,) else right


class EachByItself(SoftmaxSubject):
    """Each request computed over its own keys alone, products summed in a fixed order: its bits do not depend on the others."""

    def dots(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (queries[:, :, None] * keys[:, None]).sum(dim=-1).movedim(3, 1)

    def attend(self, scores: Tensor, visible: Tensor, values: Tensor, layer: int, batch: Batch) -> Tensor:
        wide, size, outs = self.expand(values.float()), self.keys_per_split(batch), []
        for row, length in enumerate(batch.kv_lens):
            own = slice(row, row + 1)
            cuts = [slice(start, min(start + size, length)) for start in range(0, max(1, length), size)]
            outs.append(self.merge([self.partial(scores[own, ..., cut], visible[own, :, cut], wide[own, cut]) for cut in cuts]))
        return torch.cat(outs)

    def partial(self, scores: Tensor, visible: Tensor, values: Tensor) -> Partial:
        masked = scores.masked_fill(~visible[:, None], float("-inf"))
        lse = torch.logsumexp(masked, dim=-1).transpose(1, 2)
        weight = torch.exp(masked.permute(0, 2, 3, 1) - torch.where(torch.isfinite(lse), lse, 0.0)[:, :, None])
        clean = values.masked_fill(~visible.any(dim=1)[..., None, None], 0.0)
        return Partial((weight[..., None] * clean[:, None]).sum(dim=2), lse)

    def keys_per_split(self, batch: Batch) -> int:
        return SPLIT


class SplitsByBatch(EachByItself):
    """The length of a split follows from the keys of the whole batch."""

    def keys_per_split(self, batch: Batch) -> int:
        return max(1, sum(batch.kv_lens) // 8)


def _neighbours(case: Case) -> bool:
    return several_requests(case) and ragged(case)


def _one_at_the_end(case: Case) -> bool:
    return extends(case) and case.new_lens[-1] == 1 and max(case.new_lens) > 1


plant("B112", "splits as long as the whole batch makes them", SplitsByBatch, _neighbours, EAGER, healthy=EachByItself,
      batch_invariant=True)  # fmt: skip
plant("B90", "positions one too high in decode and verify", PositionsAhead, always, (*DECODE, *VERIFY))
plant("X50", "positions of new tokens counted from 0", PositionsRestart, lambda case: extends(case) and max(case.prefix_lens) > 0, EXTEND,
      kind="spec-meta", title="Positions without the prefix")  # fmt: skip
plant("X51", "the row behind each request's last given as its last", LastIndicesShifted, always, ALL, kind="spec-meta",
      title="Last-token indices shifted by one")  # fmt: skip
plant("X52", "one query row per request, since the last request has one", DecodeStarts, _one_at_the_end, UNPADDED[:3], kind="spec-meta",
      title="Decode fast path chosen by the last request")  # fmt: skip
plant("X53", "query starts from lengths in another order", StartsPermuted, lambda case: case.new_lens != case.new_lens[::-1], UNPADDED,
      kind="batch-order", title="Row order not that of the batch")  # fmt: skip
