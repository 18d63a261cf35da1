"""Online softmax over KV pages with the running state in the input dtype: two models of rounding steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attnmatrix.cases.placement import pages_for
from attnmatrix.harness.baseline import finite_peak, score_baseline
from attnmatrix.harness.rounding import exact

Cut = Callable[[Tensor], Tensor]
Add = Callable[[Tensor, torch.dtype], Tensor]


@dataclass(frozen=True)
class Arithmetic:
    """``cut`` is applied to the factors of products, ``add`` sums the weights ``[new, Hq, keys]`` of a page in a dtype."""

    cut: Cut
    add: Add


Running = tuple[Tensor, Tensor, Tensor]
"""Maximum ``[new, Hq]``, sum ``[new, Hq]`` and output ``[new, Hq, D]``, the output not yet divided by the sum."""


def rounded_after_use(
    how: Arithmetic, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, *, page_size: int, longest: int, **options: object
) -> tuple[Tensor, Tensor]:
    """Sum and output are rounded to q's dtype after each page; so is the maximum, but only after the page's weights were taken with the
    exact one, so that the pages disagree about it. Arguments as in :func:`attnmatrix.harness.baseline.softmax_baseline`."""
    score = score_baseline(how.cut(q), how.cut(k), mask, scale, **options)  # type: ignore[arg-type]
    peak, total, out = _run(score, _values(v, q), page_size, q.dtype, how, between=exact)
    return _divided(out, total).to(q.dtype), peak + torch.log(total)


def rounded_and_split(
    how: Arithmetic, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, *, page_size: int, longest: int, **options: object
) -> tuple[Tensor, Tensor]:
    """Scores, running state and the LSE and output of each split are rounded to q's dtype after every operation, the merge too.

    ``longest`` is the longest KV length of the batch, from which the splits follow as in ``_determine_max_num_kv_splits`` of
    ``conch/ops/attention/paged_attention.py``.
    """
    dtype = q.dtype
    rounded = partial(_rounded, dtype=dtype)
    score = rounded(score_baseline(how.cut(q), how.cut(k), mask, scale, **options))  # type: ignore[arg-type]
    values, pages = _values(v, q), pages_for(longest, page_size)
    step = -(-pages // min(pages, _most_splits(pages * page_size))) * page_size
    peak = score.new_full(score.shape[:2], float("-inf"))
    total, out = torch.zeros_like(peak), torch.zeros_like(q, dtype=torch.float32)
    for start in range(0, score.shape[-1], step):
        part = slice(start, start + step)
        split_peak, split_total, split_out = _run(score[..., part], values[part], page_size, dtype, how, between=rounded)
        lse = rounded(split_peak + rounded(torch.log(split_total)))
        top = torch.maximum(peak, lse)
        anchor = torch.where(torch.isfinite(top), top, 0.0)
        fade, share = rounded(torch.exp(rounded(peak - anchor))), rounded(torch.exp(rounded(lse - anchor)))
        out = rounded(rounded(out * fade[..., None]) + rounded(share[..., None] * rounded(_divided(split_out, split_total))))
        total = rounded(rounded(total * fade) + share)
        peak = top
    return _divided(out, total).to(dtype), peak + torch.log(total)


def _run(score: Tensor, values: Tensor, page_size: int, dtype: torch.dtype, how: Arithmetic, between: Cut) -> Running:
    """Over the pages of ``score`` float32 ``[new, Hq, kv]``, all results float32 holding values of ``dtype``; ``between`` is applied to a
    score less the maximum."""
    rounded = partial(_rounded, dtype=dtype)
    peak = score.new_full(score.shape[:2], float("-inf"))
    total, out = torch.zeros_like(peak), score.new_zeros(*score.shape[:2], values.shape[-1])
    for start in range(0, score.shape[-1], page_size):
        part = score[..., start : start + page_size]
        top = torch.maximum(peak, part.amax(dim=-1))
        anchor = torch.where(torch.isfinite(top), top, 0.0)
        weight = rounded(torch.exp(between(part - anchor[..., None])))
        fade = rounded(torch.exp(between(peak - anchor)))
        product = torch.einsum("nhk,khd->nhd", how.cut(weight), how.cut(values[start : start + page_size]))
        out = rounded(rounded(out * fade[..., None]) + rounded(product))
        total = rounded(rounded(total * fade) + how.add(weight, dtype))
        peak = rounded(top)
    return peak, total, out


def added_at_once(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum, rounded to ``dtype`` once."""
    return _rounded(weight.sum(dim=-1), dtype)


def _on_warps(warps: int) -> Add:
    """Lanes of ``warps`` warps add the pairs of columns that a matrix product leaves them with, then the lanes' sums are added."""

    def add(weight: Tensor, dtype: torch.dtype) -> Tensor:
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[-1] % (8 * warps)))
        lanes = padded.unflatten(-1, (-1, warps, 4, 2)).movedim(-4, -2).flatten(-2)
        return _halved(_chain(lanes, dtype).flatten(-2), dtype)

    return add


def _chain(terms: Tensor, dtype: torch.dtype) -> Tensor:
    total = terms[..., 0]
    for index in range(1, terms.shape[-1]):
        total = _rounded(total + terms[..., index], dtype)
    return total


def _largest_first(terms: Tensor, dtype: torch.dtype) -> Tensor:
    return _chain(terms.sort(dim=-1, descending=True).values, dtype)


ORDERS: tuple[Add, ...] = (added_at_once, _chain, _largest_first, _on_warps(1), _on_warps(2), _on_warps(4))
"""Orders in which a compiler may add the weights of a page, every addition rounded to the input dtype; in the first one only the sum."""


def furthest(
    model: Callable[..., tuple[Tensor, Tensor]],
    cut: Cut,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    *,
    page_size: int,
    longest: int,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """A model's result under each of the ``ORDERS``, row by row the one furthest from the same in float32: which order it is, is the
    compiler's choice, and roundings that happen to cancel in one of them do not in another. A row that none of them moves as far as such
    roundings do by chance is moved that far."""

    def attended(how: Arithmetic, *qkv: Tensor) -> tuple[Tensor, Tensor]:
        return model(how, *qkv, mask, scale, page_size=page_size, longest=longest, **options)

    plain, _ = attended(Arithmetic(exact, added_at_once), q.float(), k.float(), v.float())
    found = [attended(Arithmetic(cut, add), q, k, v) for add in ORDERS]
    outs = torch.stack([out for out, _ in found])
    distance = (outs.float() - plain).square().mean(dim=-1)
    chosen = distance.argmax(dim=0)[None, ..., None].expand(1, *outs.shape[1:])
    out, strayed = outs.gather(0, chosen)[0], distance.amax(dim=0).sqrt()
    chance = _by_chance(score_baseline(q, k, mask, scale, **options), page_size, q.dtype)  # type: ignore[arg-type]
    moved = (plain * (1 + chance[..., None])).to(q.dtype)
    return torch.where((strayed < chance * plain.square().mean(dim=-1).sqrt())[..., None], moved, out), found[0][1]


def _by_chance(score: Tensor, page_size: int, dtype: torch.dtype) -> Tensor:
    """``[new, Hq]``: how far, relative to it, the sum of the weights strays when the weights of each page are added one by one in ``dtype``,
    each addition being off by at most half a unit of the partial sum."""
    if not score.shape[-1]:
        return score.new_zeros(score.shape[:2])
    weight = torch.exp(score - finite_peak(score)[..., None])
    pages = torch.nn.functional.pad(weight, (0, -weight.shape[-1] % page_size)).unflatten(-1, (-1, page_size))
    partial = torch.where(pages > 0, pages.cumsum(dim=-1), 0.0)
    total = weight.sum(dim=-1)
    strayed = torch.finfo(dtype).eps / 2 * stray(partial.flatten(-2))
    return torch.where(total > 0, strayed / total, 0.0)


def stray(bounds: Tensor) -> Tensor:
    """How far a sum strays by chance whose terms are each off by at most ``bounds`` ``[..., terms]``, independently and with mean zero.

    That is the model of Higham and Mary 2019, "A new approach to probabilistic rounding error analysis"; by Hoeffding's inequality the sum is
    off by more than ``c`` times the root of the sum of squares of the bounds with a probability below ``2 * exp(-c**2 / 2)``. Here c = 1,
    and the limit's factor is the c that is judged by.
    """
    return bounds.square().sum(dim=-1).sqrt()


def _halved(terms: Tensor, dtype: torch.dtype) -> Tensor:
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        terms = _rounded(terms[..., :half] + terms[..., half:], dtype)
    return terms[..., 0]


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).float()


def _values(v: Tensor, q: Tensor) -> Tensor:
    return v.float().repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def _divided(out: Tensor, total: Tensor) -> Tensor:
    return torch.where(total[..., None] > 0, out / total[..., None], 0.0)


def _most_splits(tokens: int) -> int:
    """Splits of a table that holds ``tokens``: they double with the length, 32 from 2049 tokens on, 64 from 8193 on."""
    if tokens > 2048:
        return 64 if tokens > 8192 else 32
    return max(1, 2 ** ((tokens - 1) // 128).bit_length())
