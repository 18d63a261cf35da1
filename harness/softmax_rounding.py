"""Softmax attention as a kernel rounds it that names rounding steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor

from attnmatrix.harness.baseline import finite_peak, score_baseline, softmax_baseline
from attnmatrix.harness.online_softmax import Arithmetic, Cut, added_at_once, furthest, rounded_after_use, rounded_and_split
from attnmatrix.harness.rounding import (
    ELEMENT_PRODUCTS,
    ROUNDED_AFTER_USE,
    ROUNDED_AND_SPLIT,
    SINK_RESCALE,
    TF32_PRODUCTS,
    WEIGHTS_ADDED,
    WEIGHTS_ROUNDED,
    check_known,
    exact,
    tf32,
)


def softmax_rounded(steps: Collection[str]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The softmax baseline under the named steps; called as :func:`softmax_baseline` plus the case's ``page_size`` and its ``longest`` KV
    length."""
    check_known(
        steps, (ROUNDED_AFTER_USE, ROUNDED_AND_SPLIT, WEIGHTS_ADDED, TF32_PRODUCTS, SINK_RESCALE, ELEMENT_PRODUCTS, WEIGHTS_ROUNDED)
    )
    if ELEMENT_PRODUCTS in steps and set(steps) & {TF32_PRODUCTS, WEIGHTS_ROUNDED, ROUNDED_AFTER_USE, ROUNDED_AND_SPLIT}:
        raise ValueError(f"no model of {ELEMENT_PRODUCTS} together with {', '.join(sorted(set(steps) - {ELEMENT_PRODUCTS}))}")
    if WEIGHTS_ROUNDED in steps and set(steps) & {ROUNDED_AFTER_USE, ROUNDED_AND_SPLIT}:
        raise ValueError(f"no model of {WEIGHTS_ROUNDED} in a running state in the input dtype")
    cut = tf32 if TF32_PRODUCTS in steps else exact
    models = [model for name, model in ((ROUNDED_AFTER_USE, rounded_after_use), (ROUNDED_AND_SPLIT, rounded_and_split)) if name in steps]
    inner: Callable[..., tuple[Tensor, Tensor]] = _textbook
    if models:
        with_order = partial(furthest, models[0], cut) if WEIGHTS_ADDED in steps else partial(models[0], Arithmetic(cut, added_at_once))
        inner = partial(_without_sinks, with_order)
    elif WEIGHTS_ADDED in steps:
        raise ValueError("only the models of a running state know added weights")
    elif TF32_PRODUCTS in steps or WEIGHTS_ROUNDED in steps:
        inner = partial(_divided_last, cut, WEIGHTS_ROUNDED in steps)
    elif ELEMENT_PRODUCTS in steps:
        inner = _elements_rounded
    return partial(_sink_rescaled, inner) if SINK_RESCALE in steps else inner


def _textbook(*args: Tensor, page_size: int, longest: int, **options: object) -> tuple[Tensor, Tensor]:
    return softmax_baseline(*args, **options)  # type: ignore[arg-type]


def _elements_rounded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    *,
    page_size: int,
    longest: int,
    distance: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Each product of elements is rounded before the float32 sum over the head dim; as many key/value heads as query heads."""
    parts = [softmax_baseline(q[:0], k, v, mask[:0], scale, **options)]  # type: ignore[arg-type]
    for row in range(len(q)):
        one, behind = slice(row, row + 1), None if distance is None else distance[row : row + 1]
        parts.append(softmax_baseline(torch.ones_like(q[one]), q[one] * k, v, mask[one], scale, distance=behind, **options))  # type: ignore[arg-type]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _divided_last(
    cut: Cut,
    rounds: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    *,
    page_size: int,
    longest: int,
    sinks: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """The weights, relative to the largest, meet V before they are divided by their float32 sum.

    ``cut`` is applied to the factors of products. ``rounds``: the weights are rounded to q's dtype before that and before they are
    summed, so that the LSE sees it.
    """
    score = score_baseline(cut(q), cut(k), mask, scale, **options)  # type: ignore[arg-type]
    peak = finite_peak(score)
    plain = torch.exp(score - peak[..., None])
    weight = plain.to(q.dtype).float() if rounds else plain
    sink = torch.exp(sinks - peak) if sinks is not None else torch.zeros_like(peak)
    total, plain_total = weight.sum(dim=-1) + sink, plain.sum(dim=-1) + sink
    values = cut(v.float()).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    out = torch.einsum("nhk,khd->nhd", cut(weight), values) / total[..., None]
    lse = peak + torch.log(plain_total)
    if rounds:
        lse = torch.where(plain_total > 0, lse + _strayed(plain, total, plain_total, torch.finfo(q.dtype).eps / 2), lse)
    return torch.where(total[..., None] > 0, out, 0.0).to(q.dtype), lse


def _strayed(weight: Tensor, total: Tensor, plain_total: Tensor, unit: float) -> Tensor:
    """Nats by which rounded weights move the LSE: as far as these roundings did or, if that is further, as far as such roundings do.

    Each of ``weight`` ``[new, Hq, kv]`` is off by at most ``unit * weight``, independently and with mean zero (the model of Higham and
    Mary 2019, "A new approach to probabilistic rounding error analysis"). By Hoeffding's inequality their sum is then off by more
    than ``c * unit * sqrt(sum(weight**2))`` with a probability below ``2 * exp(-c**2 / 2)``; here c = 1, and the limit's factor is
    the c that is judged by. How far one draw went says little about another: a kernel's weights are relative to the largest score
    of the keys it met first or in one split. The largest weight is 1 and exact in each of them.
    """
    by_chance = unit * torch.where(weight < 1, weight, 0.0).square().sum(dim=-1).sqrt() / plain_total
    here = torch.log(total / plain_total)
    return torch.copysign(torch.maximum(here.abs(), by_chance), here)


def _without_sinks(
    model: Callable[..., tuple[Tensor, Tensor]], *args: object, sinks: Tensor | None = None, **options: object
) -> tuple[Tensor, Tensor]:
    if sinks is not None:
        raise ValueError("the models of a running state know no sinks")
    out, lse = model(*args, **options)
    return out, lse


def _sink_rescaled(
    inner: Callable[..., tuple[Tensor, Tensor]], *args: Tensor, sinks: Tensor | None = None, **options: object
) -> tuple[Tensor, Tensor]:
    """Attention without sinks, its rounded output then scaled by the probability that the sink leaves."""
    out, lse = inner(*args, **options)
    if sinks is None:
        return out, lse
    left = torch.sigmoid(lse - sinks[None, :])
    return (out.float() * left[..., None]).to(out.dtype), torch.logaddexp(lse, sinks[None, :].expand_as(lse))
