"""Rows or splits without a key."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.merging import empty_split
from attnmatrix.harness.faults.softmax_subject import SPLIT, Partial, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import plant, requests


class Unguarded(SoftmaxSubject):
    """Softmax over no key is 0/0 for the rows that ``unguarded`` names."""

    def attend(self, scores: Tensor, visible: Tensor, values: Tensor, layer: int, batch: Batch) -> Tensor:
        self.starts = torch.arange(0, scores.shape[-1], SPLIT).tolist()
        self.lens = batch.attn_metadata.cache_seqlens
        return super().attend(scores, visible, values, layer, batch)

    def partial(self, scores: Tensor, visible: Tensor, values: Tensor) -> Partial:
        part = super().partial(scores, visible, values)
        bad = torch.isneginf(part.lse) & self.unguarded(self.lens > self.starts.pop(0))[:, None, None]
        return Partial(part.out.masked_fill(bad[..., None], float("nan")), part.lse)

    def unguarded(self, reached: Tensor) -> Tensor:
        """bool ``[R]`` from whether a request's keys reach into the split."""
        return ~reached


class MaskedRowUnguarded(Unguarded):
    def unguarded(self, reached: Tensor) -> Tensor:
        return reached


class UniformWhenMasked(SoftmaxSubject):
    """Masked scores hold a large negative number that is added up as a split's LSE from its count alone."""

    def partial(self, scores: Tensor, visible: Tensor, values: Tensor) -> Partial:
        part = super().partial(scores, visible, values)
        empty = torch.isneginf(part.lse)
        mean = self_values(values, visible).mean(dim=1)[:, None]
        return Partial(torch.where(empty[..., None], mean, part.out), part.lse.masked_fill(empty, 0.0))


def self_values(values: Tensor, visible: Tensor) -> Tensor:
    """``values`` ``[R, L, Hq, D]`` with those that no token of the request sees set to zero."""
    return values.masked_fill(~visible.any(dim=1)[..., None, None], 0.0)


def _masked_split(case: Case) -> bool:
    """A token that sees no key of a split that its request's keys reach into."""
    return any(prefix < (prefix + new - 1) // SPLIT * SPLIT for prefix, new in requests(case))


plant("B95", "a split without keys divided by zero", Unguarded, empty_split, like=("B55", "B96"))
plant("B96", "a split whose keys are all masked divided by zero", MaskedRowUnguarded, _masked_split, like=("B55", "B95"))
plant("X43", "a split whose keys are all masked given the weight of a score of zero", UniformWhenMasked, empty_split,
      kind="zero-len", title="Fully masked split taken for an average one")  # fmt: skip
