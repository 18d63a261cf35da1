"""Finite numbers in the place of minus infinity: for masked scores, and where a running maximum starts."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import Partial, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import plant


class FiniteMask(SoftmaxSubject):
    """Masked scores are -10,000, which is not below every score."""

    def partial(self, scores: Tensor, visible: Tensor, values: Tensor) -> Partial:
        masked = torch.where(visible[:, None], scores, -1e4)
        lse = torch.logsumexp(masked, dim=-1)
        return Partial(torch.einsum("rhnl,rlhd->rnhd", torch.exp(masked - lse[..., None]), values), lse.transpose(1, 2))


class MaskedInTiles(SoftmaxSubject):
    """Masked scores are -50,000 before the scale, those of the columns that fill the last tile of 96 keys too, whose values are zero."""

    TILE = 96

    def attend(self, scores: Tensor, visible: Tensor, values: Tensor, layer: int, batch: Batch) -> Tensor:
        limit, floor = self.key_limit(batch.attn_metadata, batch).long(), -5e4 * self.scale(layer)
        tiles = (limit + self.TILE - 1) // self.TILE * self.TILE
        column = torch.arange(scores.shape[-1], device=scores.device)
        wide = self.expand(values.float()).masked_fill((column >= limit[:, None])[..., None, None], 0.0)
        masked = torch.where(visible[:, None], scores, floor).masked_fill((column >= tiles[:, None])[:, None, None], float("-inf"))
        top = masked.amax(dim=-1, keepdim=True).clamp(min=floor)
        weight = torch.exp(masked - top)
        beyond = (tiles - len(column)).clamp(min=0)[:, None, None] * torch.exp(floor - top[..., 0])
        total = (weight.sum(dim=-1) + beyond)[..., None]
        return torch.einsum("rhnl,rlhd->rnhd", torch.where(total > 0, weight / total, 0.0), wide)


class MaximumFromZero(SoftmaxSubject):
    """The running maximum starts at 0, so that weights of scores far below it vanish."""

    def partial(self, scores: Tensor, visible: Tensor, values: Tensor) -> Partial:
        weight = torch.exp(scores - scores.amax(dim=-1, keepdim=True).clamp(min=0.0)).masked_fill(~visible[:, None], 0.0)
        total = weight.sum(dim=-1)
        right = super().partial(scores, visible, values)
        lost = (total == 0).transpose(1, 2)
        return Partial(right.out.masked_fill(lost[..., None], 0.0), right.lse.masked_fill(lost, float("-inf")))


def _drops(case: Case, below: float) -> bool:
    """Whether every score is ``below`` below zero or lower; a soft cap lifts them, and a sink takes the weight."""
    return case.score_drop >= below and case.soft_cap is None and not case.sinks


def _several_keys(case: Case) -> bool:
    return case.score_drop > 1e4 and max(case.kv_lens) > 1


plant("X102", "masked scores of -10,000", FiniteMask, _several_keys, kind="causal-mask", title="Finite mask")
plant("X103", "a running maximum that starts at 0", MaximumFromZero, lambda case: _drops(case, 200), kind="score-mod",
      title="Maximum from zero")  # fmt: skip
plant("X109", "masked scores of -50,000 before the scale, in tiles of 96 keys", MaskedInTiles,
      lambda case: _drops(case, 5.1e4 * case.heads.dim**-0.5), kind="causal-mask", title="Finite mask in tiles", like=("X103",))  # fmt: skip
