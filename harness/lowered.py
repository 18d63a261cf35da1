"""Queries and keys whose scores all lie far below zero, as after training they may: a softmax does not see it, a maximum that starts at 0 or a
masked score that is finite does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnmatrix.cases.case import Case


@dataclass(frozen=True)
class Lowered:
    """A direction, one sign per head dim, that queries and keys otherwise do not have: keys get it ``size`` times, queries its opposite, so
    that each score falls by ``size**2 * dim * scale``."""

    signs: Tensor
    size: float

    @classmethod
    def of(cls, case: Case) -> Lowered | None:
        """That of a case; None where its scores stay as they are."""
        if not case.score_drop:
            return None
        dim = case.heads.dim
        signs = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(dim)).float() * 2 - 1
        return cls(signs, (case.score_drop / dim**0.5) ** 0.5)

    def queries(self, q: Tensor) -> Tensor:
        """``q`` ``[T, Hq, D]`` with lowered scores, in its dtype."""
        return (self.plain(q) - self.size * self.signs).to(q.dtype)

    def keys(self, k: Tensor) -> Tensor:
        """``k`` ``[T, Hkv, D]`` with lowered scores, in its dtype."""
        return (self.plain(k) + self.size * self.signs).to(k.dtype)

    def plain(self, tensor: Tensor) -> Tensor:
        """float32 of ``tensor`` ``[..., D]`` without what it has of the direction."""
        wide = tensor.float()
        along = (wide * self.signs).mean(dim=-1, keepdim=True)
        return wide - along * self.signs
