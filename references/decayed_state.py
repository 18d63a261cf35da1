"""Lightning attention: a decayed state per head, one token at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    decay = torch.exp(-slopes.to(dtype)).view(1, -1, 1, 1)
    qd, kd, vd = (t.to(dtype) for t in (q, k, v))

    def advance(state: Tensor, at: Tensor) -> Tensor:
        return state * decay + kd[at].unsqueeze(-1) * vd[at].unsqueeze(-2)

    def read(state: Tensor, at: Tensor) -> Tensor:
        return torch.einsum("rhk,rhkv->rhv", qd[at], state) * scale

    return _scan(initial.to(dtype), advance, read, new_lens, v.to(dtype), trees, keep_tokens)


def decayed_state_sizes(
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
) -> DecayedStateResult:
    """How large the terms are whose sum :func:`decayed_state_attention` is (same arguments): the condition of each result.

    The same recurrence over absolute values, each term times ``1 + exponent`` where ``exp(-exponent)`` is its decay: a decay of
    exponent x carries a relative error of x rounding units, whether multiplied up token by token or taken from one rounded product
    (Higham 2002, section 3.1).
    """
    rate = slopes.double().view(1, -1, 1, 1)
    decay = torch.exp(-rate)
    qd, kd, vd = (t.double().abs() for t in (q, k, v))
    start = initial.double().abs()

    def advance(pair: Tensor, at: Tensor) -> Tensor:
        plain, weighted = pair.unbind(-1)
        outer = kd[at].unsqueeze(-1) * vd[at].unsqueeze(-2)
        return torch.stack([plain * decay + outer, (weighted + rate * plain) * decay], dim=-1)

    def read(pair: Tensor, at: Tensor) -> Tensor:
        return torch.einsum("rhk,rhkv->rhv", qd[at], pair.sum(dim=-1)) * abs(scale)

    pairs = _scan(torch.stack([start, torch.zeros_like(start)], dim=-1), advance, read, new_lens, vd, trees, keep_tokens)
    return DecayedStateResult(pairs.out, pairs.final.sum(dim=-1), pairs.tokens.sum(dim=-1) if pairs.tokens is not None else None)


def _scan(
    initial: Tensor,
    advance: Callable[[Tensor, Tensor], Tensor],
    read: Callable[[Tensor, Tensor], Tensor],
    new_lens: Sequence[int],
    v: Tensor,
    trees: Sequence[Sequence[int]] | None,
    keep_tokens: bool,
) -> DecayedStateResult:
    """Token by token over all requests at once; ``v`` ``[T, H, V]`` gives the output's shape and dtype."""
    starts = torch.tensor([sum(new_lens[:r]) for r in range(len(new_lens))], device=v.device)
    lens = torch.tensor(new_lens, device=v.device, dtype=torch.int64)
    state, out = initial.clone(), torch.zeros_like(v)
    tokens = initial.new_zeros(v.shape[0], *initial.shape[1:]) if keep_tokens or trees is not None else None
    for step in range(max(new_lens, default=0)):
        rows = (lens > step).nonzero().flatten()
        at = starts[rows] + step
        previous = state[rows]
        if trees is not None and tokens is not None:
            parents = [(r, trees[r][step]) for r in rows.tolist()]
            previous = torch.stack([initial[r] if parent < 0 else tokens[int(starts[r]) + parent] for r, parent in parents])
        current = advance(previous, at)
        out[at] = read(current, at)
        state[rows] = current
        if tokens is not None:
            tokens[at] = current
    return DecayedStateResult(out, state, tokens)
