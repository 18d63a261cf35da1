"""Roundings that a kernel performs beyond the textbook sequence: models that a row names and that take no number."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attnmatrix.harness.baseline import score_baseline, softmax_baseline
from attnmatrix.harness.chunk_products import chunk_products
from attnmatrix.harness.online_softmax import Arithmetic, added_at_once, furthest, rounded_after_use, rounded_and_split

PARTIAL_SUMS = "partial sums of 32 key dims in the input dtype"
WIDE_PARTIAL_SUMS = "partial sums of 128 key dims in the input dtype"
TF32_PRODUCTS = "products of factors cut to TF32"
CHUNK_OPERANDS = "state read by a chunk of 64, decayed scores and decayed values in the input dtype"
SINK_RESCALE = "output rounded once before the sink rescales it"
ROUNDED_AFTER_USE = "running sum and output in the input dtype, the running maximum rounded after its use"
ROUNDED_AND_SPLIT = "scores, running state and results of splits in the input dtype"
WEIGHTS_ADDED = "weights of a page added one by one in the input dtype"
ELEMENT_PRODUCTS = "products of a query's and a key's elements in the input dtype"
WEIGHTS_ROUNDED = "weights rounded to the input dtype before they are summed"

CHUNK = 32  # tokens that Lightning's prefill kernels take at a time
STATE_STEPS = frozenset({TF32_PRODUCTS, CHUNK_OPERANDS})  # of chunked_decay; the others reach the output alone
KEY_SPLITS = {PARTIAL_SUMS: 32, WIDE_PARTIAL_SUMS: 128}  # key dims per partial sum
_TF32_CUT = -(1 << 13)  # mask that leaves 10 of float32's 23 mantissa bits, as tensor cores read a float32 operand


@dataclass(frozen=True)
class ChunkedDecay:
    """``out`` ``[T, H, V]`` in the input dtype and ``final`` ``[R, H, K, V]`` float32."""

    out: Tensor
    final: Tensor


def softmax_rounded(steps: Collection[str]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The softmax baseline under the named steps; called as :func:`softmax_baseline` plus the case's ``page_size`` and its ``longest`` KV
    length."""
    _check(steps, (ROUNDED_AFTER_USE, ROUNDED_AND_SPLIT, WEIGHTS_ADDED, TF32_PRODUCTS, SINK_RESCALE, ELEMENT_PRODUCTS, WEIGHTS_ROUNDED))
    cut = _tf32 if TF32_PRODUCTS in steps else _exact
    models = [model for name, model in ((ROUNDED_AFTER_USE, rounded_after_use), (ROUNDED_AND_SPLIT, rounded_and_split)) if name in steps]
    inner: Callable[..., tuple[Tensor, Tensor]] = _textbook
    if models:
        with_order = partial(furthest, models[0], cut) if WEIGHTS_ADDED in steps else partial(models[0], Arithmetic(cut, added_at_once))
        inner = partial(_without_sinks, with_order)
    elif WEIGHTS_ADDED in steps:
        raise ValueError("only the models of a running state know added weights")
    elif TF32_PRODUCTS in steps:
        inner = _products_cut
    elif ELEMENT_PRODUCTS in steps:
        inner = _elements_rounded
    elif WEIGHTS_ROUNDED in steps:
        inner = _weights_rounded
    return partial(_sink_rescaled, inner) if SINK_RESCALE in steps else inner


def _textbook(*args: Tensor, page_size: int, longest: int, **options: object) -> tuple[Tensor, Tensor]:
    return softmax_baseline(*args, **options)  # type: ignore[arg-type]


def _products_cut(
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
    """All factors are cut to TF32, the weights before they are divided by their float32 sum."""
    score = score_baseline(_tf32(q), _tf32(k), mask, scale, **options)  # type: ignore[arg-type]
    lse = torch.logsumexp(score, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.expand_as(lse))
    peak = score.amax(dim=-1).nan_to_num(neginf=0.0)
    values = _tf32(v).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    out = torch.einsum("nhk,khd->nhd", _tf32(torch.exp(score - peak[..., None])), values) * torch.exp(peak - lse)[..., None]
    return torch.where(torch.isfinite(lse)[..., None], out, 0.0).to(q.dtype), lse


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
    parts = []
    for row in range(len(q)):
        one, behind = slice(row, row + 1), None if distance is None else distance[row : row + 1]
        parts.append(softmax_baseline(torch.ones_like(q[one]), q[one] * k, v, mask[one], scale, distance=behind, **options))  # type: ignore[arg-type]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _weights_rounded(
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
    """The weights, relative to the largest, are rounded before both their products with V and their float32 sum: the LSE sees it."""
    score = score_baseline(q, k, mask, scale, **options)  # type: ignore[arg-type]
    peak = score.amax(dim=-1).nan_to_num(neginf=0.0)
    weight = torch.exp(score - peak[..., None]).to(q.dtype).float()
    total = weight.sum(dim=-1)
    if sinks is not None:
        total = total + torch.exp(sinks - peak)
    out = torch.einsum("nhk,khd->nhd", weight, v.float().repeat_interleave(q.shape[1] // v.shape[1], dim=1))
    return torch.where(total > 0, (out / total[..., None]).movedim(-1, 0), 0.0).movedim(0, -1).to(q.dtype), peak + torch.log(total)


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


def chunked_decay(
    steps: Collection[str], q: Tensor, k: Tensor, v: Tensor, initial: Tensor, slopes: Tensor, new_lens: Sequence[int], scale: float
) -> ChunkedDecay:
    """Decayed-state attention chunk by chunk with the decays factored into q and k, under the named steps.

    Arguments as in :func:`attnmatrix.references.decayed_state.decayed_state_attention`. Token i of a chunk of n is scaled by
    ``exp(slope * (n - 1 - i))``, its key by the inverse (lightning attention, arXiv 2401.04658, algorithm 1).
    """
    _check(steps, (PARTIAL_SUMS, WIDE_PARTIAL_SUMS, TF32_PRODUCTS, CHUNK_OPERANDS))
    cut = _tf32 if TF32_PRODUCTS in steps else _exact
    if CHUNK_OPERANDS in steps:
        return ChunkedDecay(*chunk_products(cut, q, k, v, initial, slopes, new_lens, scale))
    splits = next((q.shape[2] // KEY_SPLITS[step] for step in sorted(steps) if step in KEY_SPLITS), 1)
    rate = slopes.float().view(-1, 1, 1)
    qs, ks = (t.float().unflatten(2, (splits, -1)).permute(2, 1, 0, 3) for t in (q, k))  # [S, H, T, K / S]
    vs = v.float().transpose(0, 1)  # [H, T, V]
    parts = torch.empty(splits, *q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    finals, start = [], 0
    for request, new in enumerate(new_lens):
        state = initial[request].float().unflatten(1, (splits, -1)).transpose(0, 1)  # [S, H, K / S, V]
        for begin in range(start, start + new, CHUNK):
            at = slice(begin, min(begin + CHUNK, start + new))
            count = at.stop - at.start
            left = torch.arange(count - 1, -1, -1, device=q.device)[:, None]
            query, key, value = cut(qs[:, :, at] * torch.exp(rate * left)), cut(ks[:, :, at] * torch.exp(-rate * left)), cut(vs[:, at])
            score = (query @ key.transpose(-1, -2) * scale).tril()
            fade = torch.exp(-rate * count)
            out = query @ cut(state) * fade * scale + cut(score) @ value
            state = state * fade + key.transpose(-1, -2) @ value
            parts[:, at] = out.transpose(1, 2).to(q.dtype)
        finals.append(state.transpose(0, 1).flatten(1, 2))
        start += new
    return ChunkedDecay(parts.float().sum(dim=0).to(q.dtype), torch.stack(finals))


def _exact(tensor: Tensor) -> Tensor:
    return tensor


def _tf32(tensor: Tensor) -> Tensor:
    """float32 with the mantissa bits that TF32 lacks cut off."""
    return (tensor.float().contiguous().view(torch.int32) & _TF32_CUT).view(torch.float32)


def _check(steps: Collection[str], known: Sequence[str]) -> None:
    unknown = [step for step in steps if step not in known]
    if unknown:
        raise ValueError(f"unknown rounding step {unknown[0]!r}; known here: {', '.join(known)}")
