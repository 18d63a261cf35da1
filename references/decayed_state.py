"""Lightning attention: a decayed state per head, one token at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecayedStateResult:
    """``out`` ``[T, H, V]``, ``final`` ``[R, H, K, V]``; ``tokens`` ``[T, H, K, V]`` is the state after each token, if kept.

    ``final`` and ``tokens`` are sums; ``final_parts`` and ``token_parts`` what they are the sums of.
    """

    out: Tensor
    final: Tensor
    tokens: Tensor | None
    final_parts: tuple[Tensor, ...] = ()
    token_parts: tuple[Tensor, ...] = ()


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

    def advance(states: Sequence[Tensor], at: Tensor) -> None:
        states[0].mul_(decay).addcmul_(kd[at].unsqueeze(-1), vd[at].unsqueeze(-2))

    def read(states: Sequence[Tensor], at: Tensor) -> Tensor:
        return torch.einsum("rhk,rhkv->rhv", qd[at], states[0]) * scale

    return _scan((initial.to(dtype),), advance, read, new_lens, vd, trees, keep_tokens)


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
    weighted: Tensor | None = None,
) -> DecayedStateResult:
    """How large the terms are whose sum :func:`decayed_state_attention` is (same arguments): the condition of each result.

    The same recurrence over absolute values, each term times ``1 + n`` where n decays were applied to it: a kernel that goes
    token by token multiplies by a rounded factor n times, and however close to 1 the factor is, each rounding counts in full
    (Higham 2002, section 3.1). A history goes on from its two parts: the plain sizes as ``initial``, those times n as ``weighted``.
    """
    decay = torch.exp(-slopes.float()).view(1, -1, 1, 1)
    qd, kd, vd = (t.float().abs() for t in (q, k, v))
    start = initial.float().abs()

    def advance(states: Sequence[Tensor], at: Tensor) -> None:
        plain, weighted = states
        weighted.add_(plain).mul_(decay)
        plain.mul_(decay).addcmul_(kd[at].unsqueeze(-1), vd[at].unsqueeze(-2))

    def read(states: Sequence[Tensor], at: Tensor) -> Tensor:
        return torch.einsum("rhk,rhkv->rhv", qd[at], states[0] + states[1]) * abs(scale)

    return _scan(
        (start, torch.zeros_like(start) if weighted is None else weighted.float()), advance, read, new_lens, vd, trees, keep_tokens
    )


def _scan(
    initial: Sequence[Tensor],
    advance: Callable[[Sequence[Tensor], Tensor], None],
    read: Callable[[Sequence[Tensor], Tensor], Tensor],
    new_lens: Sequence[int],
    v: Tensor,
    trees: Sequence[Sequence[int]] | None,
    keep_tokens: bool,
) -> DecayedStateResult:
    """Token by token over all requests at once, the longest requests first so that the live ones stay a prefix.

    ``initial``: one or more running states ``[R, H, K, V]`` that ``advance`` updates in place; results are their sum. ``v`` gives the
    output's shape and dtype.
    """
    order = sorted(range(len(new_lens)), key=lambda request: -new_lens[request])
    starts = torch.tensor([sum(new_lens[:request]) for request in order], device=v.device, dtype=torch.int64)
    running = [state[order].clone() for state in initial]
    kept = [state.new_zeros(v.shape[0], *state.shape[1:]) for state in initial] if keep_tokens or trees is not None else []
    out = torch.zeros_like(v)
    for step in range(max(new_lens, default=0)):
        live = sum(new > step for new in new_lens)
        at = starts[:live] + step
        views = [state[:live] for state in running]
        if trees is not None:
            parents = [trees[request][step] for request in order[:live]]
            rows = list(zip(order[:live], at.tolist(), parents, strict=True))
            for first, tokens, view in zip(initial, kept, views, strict=True):
                view.copy_(torch.stack([first[r] if p < 0 else tokens[token - step + p] for r, token, p in rows]))
        advance(views, at)
        out[at] = read(views, at)
        for tokens, view in zip(kept, views, strict=False):
            tokens[at] = view
    back = torch.tensor(order, device=v.device, dtype=torch.int64).argsort()
    finals = tuple(state[back] for state in running)
    final = torch.stack(finals).sum(dim=0)
    return DecayedStateResult(out, final, torch.stack(kept).sum(dim=0) if kept else None, finals, tuple(kept))
