"""Lightning attention: a decayed state per head, one token at a time, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecayedStateResult:
    """``out`` ``[T, H, V]``, ``final`` ``[R, H, K, V]``; ``tokens`` ``[T, H, K, V]`` is the state after each token, if kept."""

    out: Tensor
    final: Tensor
    tokens: Tensor | None


def decayed_state_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: Tensor,
    slopes: Tensor,
    new_lens: Sequence[int],
    scale: float,
    *,
    trees: Sequence[Sequence[int]] | None = None,
    keep_tokens: bool = False,
    dtype: torch.dtype = torch.float64,
) -> DecayedStateResult:
    """``state_t = state_parent * exp(-slope) + outer(k_t, v_t)``, ``o_t = q_t @ state_t * scale`` (MiniMax-01, eq. 9).

    ``q``, ``k`` ``[T, H, K]`` and ``v`` ``[T, H, V]`` are packed by request, ``initial`` ``[R, H, K, V]``, ``slopes``
    ``[H]``. ``trees[r][i]`` is the parent of token i within request r (-1: the initial state); ``None`` means chains,
    where ``final`` is the state after each request's last token. With trees, states are kept and ``final`` is the last
    token's. Vectorised over requests and heads, looped over tokens only. ``dtype`` other than float64 serves baselines.
    """
    requests, longest = len(new_lens), max(new_lens, default=0)
    heads, dim_k, dim_v = q.shape[1], q.shape[2], v.shape[2]
    starts = torch.tensor([sum(new_lens[:r]) for r in range(requests)], device=q.device)
    lens = torch.tensor(new_lens, device=q.device, dtype=torch.int64)
    decay = torch.exp(-slopes.to(dtype)).view(1, heads, 1, 1)
    qd, kd, vd = (t.to(dtype) for t in (q, k, v))
    state = initial.to(dtype).clone()
    out = qd.new_zeros(q.shape[0], heads, dim_v)
    keep = keep_tokens or trees is not None
    tokens = qd.new_zeros(q.shape[0], heads, dim_k, dim_v) if keep else None
    for step in range(longest):
        rows = (lens > step).nonzero().flatten()
        at = starts[rows] + step
        previous = state[rows]
        if trees is not None:
            assert tokens is not None
            parents = [trees[int(r)][step] for r in rows]
            previous = torch.stack(
                [initial[r].to(dtype) if p < 0 else tokens[starts[r] + p] for r, p in zip(rows.tolist(), parents, strict=True)]
            )
        current = previous * decay + kd[at].unsqueeze(-1) * vd[at].unsqueeze(-2)
        out[at] = torch.einsum("rhk,rhkv->rhv", qd[at], current) * scale
        state[rows] = current
        if tokens is not None:
            tokens[at] = current
    return DecayedStateResult(out, state, tokens)
