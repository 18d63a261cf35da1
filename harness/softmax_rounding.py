"""Softmax attention as a kernel rounds it that names rounding steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor

from attnmatrix.harness.baseline import softmax_baseline
from attnmatrix.harness.flash_rounding import PARTS_ROUNDED, TANH_APPROXIMATED, Flash, flash_softmax
from attnmatrix.harness.online_softmax import Arithmetic, added_at_once, furthest, rounded_after_use, rounded_and_split
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

RUNNING = (ROUNDED_AFTER_USE, ROUNDED_AND_SPLIT)
FLASH = (TF32_PRODUCTS, WEIGHTS_ROUNDED, PARTS_ROUNDED, TANH_APPROXIMATED)


def softmax_rounded(steps: Collection[str]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The softmax baseline under the named steps; called as :func:`softmax_baseline` plus the case's ``page_size`` and its ``longest`` KV
    length."""
    check_known(steps, (*RUNNING, *FLASH, WEIGHTS_ADDED, SINK_RESCALE, ELEMENT_PRODUCTS))
    if ELEMENT_PRODUCTS in steps and set(steps) & {*RUNNING, *FLASH}:
        raise ValueError(f"no model of {ELEMENT_PRODUCTS} together with {', '.join(sorted(set(steps) - {ELEMENT_PRODUCTS}))}")
    beside = set(steps) & {*FLASH} - {TF32_PRODUCTS}
    if beside and set(steps) & {*RUNNING}:
        raise ValueError(f"no model of {', '.join(sorted(beside))} in a running state in the input dtype")
    cut = tf32 if TF32_PRODUCTS in steps else exact
    models = [model for name, model in ((ROUNDED_AFTER_USE, rounded_after_use), (ROUNDED_AND_SPLIT, rounded_and_split)) if name in steps]
    inner: Callable[..., tuple[Tensor, Tensor]] = _textbook
    if models:
        with_order = partial(furthest, models[0], cut) if WEIGHTS_ADDED in steps else partial(models[0], Arithmetic(cut, added_at_once))
        inner = partial(_without_sinks, with_order)
    elif WEIGHTS_ADDED in steps:
        raise ValueError("only the models of a running state know added weights")
    elif set(steps) & {*FLASH}:
        inner = partial(flash_softmax, Flash(cut, WEIGHTS_ROUNDED in steps, PARTS_ROUNDED in steps, TANH_APPROXIMATED in steps))
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
