"""Online softmax over KV pages with the running state in the input dtype: two models of rounding steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attnmatrix.cases.placement import pages_for
from attnmatrix.harness.baseline import score_baseline


@dataclass(frozen=True)
class Arithmetic:
    """``cut`` is applied to the factors of products, ``add`` sums the weights ``[new, Hq, keys]`` of a page in a dtype."""

    cut: Callable[[Tensor], Tensor]
    add: Callable[[Tensor, torch.dtype], Tensor]


Running = tuple[Tensor, Tensor, Tensor]
"""Maximum ``[new, Hq]``, sum ``[new, Hq]`` and output ``[new, Hq, D]``, the output not yet divided by the sum."""


def rounded_after_use(
    how: Arithmetic, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, *, page_size: int, longest: int, **options: object
) -> tuple[Tensor, Tensor]:
    """Sum and output are rounded to q's dtype after each page; so is the maximum, but only after the page's weights were taken with the
    exact one, so that the pages disagree about it. Arguments as in :func:`attnmatrix.harness.baseline.softmax_baseline`."""
    score = score_baseline(how.cut(q), how.cut(k), mask, scale, **options)  # type: ignore[arg-type]
    peak, total, out = _run(score, _values(v, q), page_size, q.dtype, how, exact=True)
    return _divided(out, total), peak + torch.log(total)


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
        split_peak, split_total, split_out = _run(score[..., part], values[part], page_size, dtype, how, exact=False)
        lse = rounded(split_peak + rounded(torch.log(split_total)))
        top = torch.maximum(peak, lse)
        fade, share = rounded(torch.exp(rounded(peak - top))), rounded(torch.exp(rounded(lse - top)))
        out = rounded(rounded(out * fade[..., None]) + rounded(share[..., None] * rounded(_divided(split_out, split_total))))
        total = rounded(rounded(total * fade) + share)
        peak = top
    return _divided(out, total).to(dtype), peak + torch.log(total)


def _run(score: Tensor, values: Tensor, page_size: int, dtype: torch.dtype, how: Arithmetic, exact: bool) -> Running:
    """Over the pages of ``score`` float32 ``[new, Hq, kv]``, all results float32 holding values of ``dtype``; ``exact`` takes weights
    with the exact maximum."""
    rounded = partial(_rounded, dtype=dtype)
    between = (lambda tensor: tensor) if exact else rounded
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


def added_one_by_one(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum with every addition rounded to ``dtype``, in the order that strays furthest, since the compiler chooses it: one after the
    other as they come or the largest first, or on 1, 2 or 4 warps whose lanes add the columns that a matrix product leaves them with."""
    sums = [_chain(weight, dtype), _chain(weight.sort(dim=-1, descending=True).values, dtype)]
    for warps in (1, 2, 4):
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[-1] % (8 * warps)))
        lanes = padded.unflatten(-1, (-1, warps, 4, 2)).movedim(-4, -2).flatten(-2)
        sums.append(_halved(_chain(lanes, dtype).flatten(-2), dtype))
    found = torch.stack(sums)
    return found.gather(0, (found - weight.sum(dim=-1)).abs().argmax(dim=0, keepdim=True))[0]


def _chain(terms: Tensor, dtype: torch.dtype) -> Tensor:
    total = terms[..., 0]
    for index in range(1, terms.shape[-1]):
        total = _rounded(total + terms[..., index], dtype)
    return total


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
