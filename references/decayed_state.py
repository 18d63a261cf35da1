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
    order, tokens = _in_steps(new_lens)
    qd, kd, vd = (t[tokens].to(dtype) for t in (q, k, v))

    def advance(states: Sequence[Tensor], at: slice) -> None:
        states[0].mul_(decay).addcmul_(kd[at].unsqueeze(-1), vd[at].unsqueeze(-2))

    def read(states: Sequence[Tensor], at: slice) -> Tensor:
        return _dot(qd[at], states[0])

    return _scan((initial.to(dtype),), advance, read, scale, new_lens, order, tokens, vd, trees, keep_tokens)


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
    order, tokens = _in_steps(new_lens)
    qd, kd, vd = (t[tokens].float().abs() for t in (q, k, v))
    start = initial.float().abs()

    def advance(states: Sequence[Tensor], at: slice) -> None:
        plain, weighted = states
        weighted.add_(plain).mul_(decay)
        plain.mul_(decay).addcmul_(kd[at].unsqueeze(-1), vd[at].unsqueeze(-2))

    def read(states: Sequence[Tensor], at: slice) -> Tensor:
        return _dot(qd[at], states[0] + states[1])

    both = start, torch.zeros_like(start) if weighted is None else weighted.float()
    return _scan(both, advance, read, abs(scale), new_lens, order, tokens, vd, trees, keep_tokens)


def _dot(q: Tensor, state: Tensor) -> Tensor:
    """``q @ state`` per request and head: ``[R, H, K]`` times ``[R, H, K, V]``."""
    return (q.unsqueeze(-2) @ state).squeeze(-2)


def _in_steps(new_lens: Sequence[int]) -> tuple[list[int], list[int]]:
    """The requests, the longest first, and the packed tokens step by step: every request's first in that order, then every second ..."""
    order = sorted(range(len(new_lens)), key=lambda request: -new_lens[request])
    starts = [sum(new_lens[:request]) for request in range(len(new_lens))]
    longest = max(new_lens, default=0)
    return order, [starts[request] + step for step in range(longest) for request in order if new_lens[request] > step]


def _scan(
    initial: Sequence[Tensor],
    advance: Callable[[Sequence[Tensor], slice], None],
    read: Callable[[Sequence[Tensor], slice], Tensor],
    scale: float,
    new_lens: Sequence[int],
    order: list[int],
    tokens: list[int],
    v: Tensor,
    trees: Sequence[Sequence[int]] | None,
    keep_tokens: bool,
) -> DecayedStateResult:
    """Token by token over all requests at once, the longest requests first so that the live ones stay a prefix.

    ``initial``: one or more running states ``[R, H, K, V]`` that ``advance`` updates in place; results are their sum. ``order`` and
    ``tokens`` are those of :func:`_in_steps`, slices count in that order. ``v`` gives the output's shape and dtype, ``scale`` multiplies
    what ``read`` returns.
    """
    running = [state[order] for state in initial]
    kept = [state.new_zeros(v.shape[0], *state.shape[1:]) for state in initial] if keep_tokens or trees is not None else []
    read_out = torch.zeros_like(v)
    live, start = len(order), 0
    for step in range(max(new_lens, default=0)):
        while new_lens[order[live - 1]] <= step:
            live -= 1
        at = slice(start, start + live)
        start += live
        views = [state[:live] for state in running]
        if trees is not None:
            parents = [trees[request][step] for request in order[:live]]
            rows = list(zip(order[:live], tokens[at], parents, strict=True))
            for first, states, view in zip(initial, kept, views, strict=True):
                view.copy_(torch.stack([first[r] if p < 0 else states[token - step + p] for r, token, p in rows]))
        advance(views, at)
        read_out[at] = read(views, at)
        for states, view in zip(kept, views, strict=False):
            states[tokens[at]] = view
    out = torch.zeros_like(v)
    out[tokens] = read_out * scale
    back = torch.tensor(order, device=v.device, dtype=torch.int64).argsort()
    finals = tuple(state[back] for state in running)
    return DecayedStateResult(out, _total(finals), _total(kept) if kept else None, finals, tuple(kept))


def _total(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(tuple(parts)).sum(dim=0)
