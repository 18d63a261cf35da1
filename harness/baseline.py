"""The textbook operator sequence in the case's dtype: how far a right implementation is from the reference."""

from __future__ import annotations

import torch
from torch import Tensor


def score_baseline(
    q: Tensor,
    k: Tensor,
    mask: Tensor,
    scale: float,
    *,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    distance: Tensor | None = None,
) -> Tensor:
    """float32 ``[new, Hq, kv]``: scores of one request, -inf where ``mask`` is False; arguments as in :func:`softmax_baseline`."""
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    score = torch.einsum("nhd,khd->nhk", q.float(), keys) * scale
    if soft_cap is not None:
        score = soft_cap * torch.tanh(score / soft_cap)
    if alibi_slopes is not None and distance is not None:
        score = score + alibi_slopes[None, :, None] * distance[:, None, :]
    return torch.where(mask[:, None, :], score, float("-inf"))


def finite_peak(score: Tensor, sinks: Tensor | None = None) -> Tensor:
    """float32 ``[new, Hq]``: the largest score ``[new, Hq, kv]`` or sink ``[Hq]`` of each row, 0 where it sees nothing."""
    peak = score.amax(dim=-1) if score.shape[-1] else score.new_full(score.shape[:2], float("-inf"))
    if sinks is not None:
        peak = torch.maximum(peak, sinks)
    return torch.where(torch.isfinite(peak), peak, 0.0)


def softmax_baseline(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    *,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    distance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``out`` ``[new, Hq, D]`` in q's dtype and ``lse`` ``[new, Hq]`` float32 of one request.

    Float32 scores and softmax, P rounded to the input dtype, products accumulated in float32, the output rounded.
    Arguments as in :func:`attnmatrix.references.softmax.softmax_attention`; ``distance`` is key minus query position.
    """
    score = score_baseline(q, k, mask, scale, soft_cap=soft_cap, alibi_slopes=alibi_slopes, distance=distance)
    values = v.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    peak = finite_peak(score, sinks)[..., None]
    weight = torch.exp(score - peak)
    total = weight.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[None, :, None] - peak)
    probability = torch.where(total > 0, weight / total, 0.0).to(q.dtype)
    out = torch.einsum("nhk,khd->nhd", probability.float(), values).to(q.dtype)
    return out, (peak + torch.log(total)).squeeze(-1)
