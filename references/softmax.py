"""Dense softmax attention in float64, from logical keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SoftmaxResult:
    """``out`` ``[new, Hq, Dv]``, ``lse`` ``[new, Hq]`` in nats, ``conditioning`` ``[new, Hq]``.

    The conditioning of a row is the largest ``sum_d |q_d k_d| * scale`` (plus the soft cap, plus ALiBi's ``|bias|``) over the keys
    it sees: the error of a score computed in floating point is proportional to it (Higham 2002, section 3.1), not to the score
    itself. The soft cap counts in full because kernels take ``tanh(x)`` from the exponential function, as ``2 / (1 + exp(-2x)) - 1``:
    the difference of two numbers up to 2 has an absolute error of a unit roundoff however small it is, which the cap multiplies.
    A row that sees no key has ``out`` 0, ``lse`` -inf (the sink's logit when there is one) and ``conditioning`` 0.
    """

    out: Tensor
    lse: Tensor
    conditioning: Tensor


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    *,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> SoftmaxResult:
    """Attention of one request.

    ``q`` ``[new, Hq, D]``, ``k`` ``[kv, Hkv, D]``, ``v`` ``[kv, Hkv, Dv]`` of any float dtype, ``mask`` bool ``[new, kv]``
    (True = visible), ``sinks`` and ``alibi_slopes`` ``[Hq]``; positions are needed with ALiBi only. Query head h reads
    key/value head ``h // (Hq // Hkv)``. The score is ``q . k * scale``, soft-capped to ``cap * tanh(score / cap)``
    (Gemma 2), plus ``slope * (key position - query position)`` (ALiBi). A sink is one more logit per head that takes
    probability and contributes no value (gpt-oss).
    """
    new, heads, _ = q.shape
    group = heads // k.shape[1]
    qd, kd, vd = (t.to(torch.float64) for t in (q, k, v))
    score = torch.einsum("nhd,khd->nhk", qd, kd.repeat_interleave(group, dim=1)) * scale
    size = torch.einsum("nhd,khd->nhk", qd.abs(), kd.abs().repeat_interleave(group, dim=1)) * abs(scale)
    if soft_cap is not None:
        score, size = soft_cap * torch.tanh(score / soft_cap), size + soft_cap
    if alibi_slopes is not None:
        assert query_positions is not None and key_positions is not None, "ALiBi needs positions"
        distance = (key_positions[None, :] - query_positions[:, None]).to(torch.float64)
        bias = alibi_slopes.to(torch.float64)[None, :, None] * distance[:, None, :]
        score, size = score + bias, size + bias.abs()
    seen = mask[:, None, :]
    conditioning = torch.where(seen, size, 0.0).amax(dim=-1) if score.shape[-1] else score.new_zeros(new, heads)
    score = score.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.to(torch.float64)[None, :, None].expand(new, heads, 1)
        score = torch.cat([score, sink], dim=-1)
        vd = torch.cat([vd, torch.zeros_like(vd[:1])]) if len(vd) else vd.new_zeros(1, *vd.shape[1:])
    lse = torch.logsumexp(score, dim=-1)
    weight = torch.exp(score - torch.where(torch.isfinite(lse), lse, 0.0)[..., None])
    out = torch.einsum("nhk,khd->nhd", weight, vd.repeat_interleave(group, dim=1))
    return SoftmaxResult(out, lse, conditioning)
