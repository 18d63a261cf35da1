"""Softmax attention as flash kernels round it: weights relative to the largest score meet V before they are divided by their sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnmatrix.harness.baseline import finite_peak, score_baseline
from attnmatrix.harness.online_softmax import Cut, stray
from attnmatrix.harness.rounding import exact

PARTS_ROUNDED = "parts of an output rounded to the input dtype before they are merged"
TANH_APPROXIMATED = "the soft cap's tanh to 11 bits"
TANH_UNIT = 2.0**-11
"""Largest relative error of ``tanh.approx.f32`` (PTX ISA, "Floating Point Instructions: tanh")."""


@dataclass(frozen=True)
class Flash:
    """``cut`` is applied to the factors of products. ``sums_rounded``: the weights are summed as they meet V, in q's dtype, so that the LSE
    sees it. ``parts_rounded``: the output of each half of the keys is rounded to q's dtype before both are merged. ``tanh_approximated``:
    the soft cap's tanh has 11 significant bits."""

    cut: Cut = exact
    sums_rounded: bool = False
    parts_rounded: bool = False
    tanh_approximated: bool = False


def flash_softmax(
    how: Flash,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    *,
    page_size: int,
    longest: int,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Output and LSE; arguments as in :func:`attnmatrix.harness.baseline.softmax_baseline`."""
    plain = score_baseline(how.cut(q), how.cut(k), mask, scale, soft_cap=soft_cap, **options)  # type: ignore[arg-type]
    score, unsure = plain, torch.zeros_like(plain)
    if how.tanh_approximated and soft_cap is not None:
        capped = score_baseline(how.cut(q), how.cut(k), mask, scale, soft_cap=soft_cap)
        capped = torch.where(torch.isfinite(capped), capped, 0.0)
        score, unsure = plain + (soft_cap * (capped / soft_cap).half().float() - capped), TANH_UNIT * capped.abs()
    peak = finite_peak(score)
    whole = torch.exp(score - peak[..., None])
    weight = whole.to(q.dtype).float()
    summed = weight if how.sums_rounded else whole
    sink = torch.exp(sinks - peak) if sinks is not None else torch.zeros_like(peak)
    total = summed.sum(dim=-1) + sink
    values = how.cut(v.float()).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    out = torch.zeros_like(q, dtype=torch.float32)
    for part in _halves(len(k)) if how.parts_rounded else (slice(None),):
        own = summed[..., part].sum(dim=-1) if how.parts_rounded else total
        found = _over(torch.einsum("nhk,khd->nhd", how.cut(weight[..., part]), values[part]), own)
        out = out + (found.to(q.dtype).float() * _over(own, total)[..., None] if how.parts_rounded else found)
    unit = torch.finfo(q.dtype).eps / 2 if how.sums_rounded else 0.0
    rounded = torch.where(whole < 1, unit, 0.0)  # the largest weight is 1 and exact
    chance = _over(stray(whole * (rounded.square() + unsure.square()).sqrt()), whole.sum(dim=-1) + sink)
    return out.to(q.dtype), _moved(_lse(plain, sinks), peak + torch.log(total), chance)


def _lse(score: Tensor, sinks: Tensor | None) -> Tensor:
    peak = finite_peak(score)
    sink = torch.exp(sinks - peak) if sinks is not None else torch.zeros_like(peak)
    return peak + torch.log(torch.exp(score - peak[..., None]).sum(dim=-1) + sink)


def _moved(right: Tensor, drawn: Tensor, chance: Tensor) -> Tensor:
    """The LSE as far from the ``right`` one as these roundings moved it or, if that is further, as far as such roundings do by ``chance``:
    how far one draw went says little about another, since a kernel's weights are relative to the largest score of the keys it met first
    or in one split."""
    here = torch.where(torch.isfinite(right), drawn - right, 0.0)
    return torch.where(torch.isfinite(right), right + torch.copysign(torch.maximum(here.abs(), chance), here), right)


def _halves(keys: int) -> tuple[slice, ...]:
    return (slice(0, keys // 2), slice(keys // 2, keys))


def _over(part: Tensor, whole: Tensor) -> Tensor:
    """``part`` ``[new, Hq]`` or ``[new, Hq, D]`` over ``whole`` ``[new, Hq]``, 0 where that is 0."""
    whole = whole if part.ndim == whole.ndim else whole[..., None]
    return torch.where(whole > 0, part / whole, 0.0)
