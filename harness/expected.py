"""What a step should have produced: references and baselines for the inputs that the backend really got."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.harness.decay_rounding import STATE_STEPS, chunked_decay
from attnmatrix.harness.draws import StepData
from attnmatrix.harness.dtypes import TORCH_DTYPES
from attnmatrix.harness.history import History
from attnmatrix.harness.quantise import dequantise, quantise
from attnmatrix.harness.runners.recorder import AttentionCall
from attnmatrix.harness.softmax_rounding import softmax_rounded
from attnmatrix.harness.world import World
from attnmatrix.references.decayed_state import DecayedStateResult, decayed_state_attention, decayed_state_sizes
from attnmatrix.references.softmax import softmax_attention
from attnmatrix.references.visibility import key_positions, query_positions, visible_keys

SMALL = 200_000_000  # multiplications of a step's largest product below which launching it on a GPU costs more


@dataclass(frozen=True)
class Quantity:
    """Reference, baseline ``[*shape, D]`` and conditioning ``[*shape]`` of one result; ``labels`` names the axes of shape.

    ``absolute``: errors are differences, not relative to the reference, and so is the conditioning.
    """

    labels: tuple[str, ...]
    reference: Tensor
    baseline: Tensor
    conditioning: Tensor
    absolute: bool = False


def expected_quantities(world: World, index: int, call: AttentionCall) -> dict[str, Quantity]:
    """Of step ``index``: ``out`` and ``lse`` for softmax; ``out``, ``state`` or, in target_verify, ``intermediate``, and ``snapshot`` for
    linear kinds.

    A story's steps are to be asked for in order: each goes on from the one before.
    """
    step = world.steps[index]
    place = judging_device(step.case, world.device)
    q, k, v = (tensor.to(place) for tensor in (call.q, call.k, call.v))
    if world.case.kind is AttentionKind.SOFTMAX:
        return _softmax(world, step, call.layer, q, k, v, place)
    return _lightning(world, index, call, q, k, v, place)


def judging_device(case: Case, device: torch.device) -> torch.device:
    """Where a step is judged: a small one on the CPU, whose launches cost less than its arithmetic on a GPU; the rest on its own device."""
    pairs = sum(new * kv for new, kv in zip(case.new_lens, case.kv_lens, strict=True))
    states = case.num_tokens * case.heads.dim if case.kind is not AttentionKind.SOFTMAX else 0
    small = (pairs + states) * case.heads.q * case.heads.dim < SMALL
    return torch.device("cpu") if small else device


def _softmax(world: World, step: StepData, layer: int, q: Tensor, new_k: Tensor, new_v: Tensor, place: torch.device) -> dict[str, Quantity]:
    case, context = step.case, world.context
    sinks = context.sinks.to(place) if context.sinks is not None else None
    slopes = context.alibi_slopes.to(place) if context.alibi_slopes is not None else None
    baseline = softmax_rounded(world.conventions.rounding_of(case, world.device.type))
    outs, lses, conds, base_outs, base_lses = [], [], [], [], []
    start = 0
    for request, new in enumerate(case.new_lens):
        rows = slice(start, start + new)
        start += new
        prefix = step.prefixes[request]
        k = torch.cat([prefix.keys[layer].to(place), new_k[rows]])
        v = torch.cat([prefix.values[layer].to(place), new_v[rows]])
        k, v = _as_read(case, layer, k, v)
        mask = visible_keys(case, request, layer, place)
        queries, keys = query_positions(case, request, place), key_positions(case, request, place)
        right = softmax_attention(
            q[rows], k, v, mask, context.scale, soft_cap=case.soft_cap, sinks=sinks,
            alibi_slopes=slopes, query_positions=queries, key_positions=keys,
        )  # fmt: skip
        out, lse = baseline(
            q[rows], k.to(q.dtype), v.to(q.dtype), mask, context.scale, soft_cap=case.soft_cap, sinks=sinks,
            alibi_slopes=slopes, distance=keys[None, :] - queries[:, None], page_size=case.page_size, longest=max(case.kv_lens),
        )  # fmt: skip
        outs.append(right.out)
        lses.append(right.lse)
        conds.append(right.conditioning)
        base_outs.append(out)
        base_lses.append(lse)
    conditioning, lse = torch.cat(conds), torch.cat(lses)
    dots = math.sqrt(case.heads.dim)  # as for decayed states: a score's error is the LSE's, and no softmax divides it out
    cap = case.soft_cap or 0.0  # not a sum: it does not grow with the head dim
    sizes = (conditioning - cap).clamp(min=0.0) * dots + cap + torch.nan_to_num(lse.abs(), posinf=0.0)
    lowered = torch.where(
        conditioning > 0, case.score_drop * (dots - 1), 0.0
    )  # terms of one sign: no partial sum is smaller than the score
    return {
        "out": Quantity(("token", "head"), torch.cat(outs), torch.cat(base_outs), conditioning + lowered),
        "lse": Quantity(("token", "head"), lse[..., None], torch.cat(base_lses)[..., None], sizes, absolute=True),
    }


def _as_read(case: Case, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as a right backend reads them: from a quantised cache in float64, unrounded, else as they were given."""
    if case.kv_dtype is None:
        return k, v
    dtype, (k_scale, v_scale) = TORCH_DTYPES[case.kv_dtype], case.kv_scales(layer)
    return dequantise(quantise(k, k_scale, dtype), k_scale), dequantise(quantise(v, v_scale, dtype), v_scale)


def _lightning(world: World, index: int, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, place: torch.device) -> dict[str, Quantity]:
    step, context, layer = world.steps[index], world.context, call.layer
    case = step.case
    assert context.slopes is not None
    assert context.states is not None
    held = context.states.dtype
    initial = torch.stack([prefix.states[layer].to(place) for prefix in step.prefixes])
    history = world.histories.before(index, layer, step.follows, initial)
    right, base, sizes = _recurrences(world, step, history, q, k, v, context.slopes[layer].to(place).double())
    dots = math.sqrt(case.heads.dim)  # n additions of a dot product wander by sqrt(n) roundings (Higham and Mary 2019, theorem 2.4)
    quantities = {"out": _conditioned(("token", "head"), right.out, base.out, sizes.out * dots)}
    after = History(right.final, base.final.to(held).float(), *sizes.final_parts)
    if right.tokens is not None and base.tokens is not None and sizes.tokens is not None:
        drafted = base.tokens.to(held).float()
        quantities["intermediate"] = _conditioned(("token", "head", "key row"), right.tokens, drafted, sizes.tokens)
        tokens = History(right.tokens, drafted, *sizes.token_parts)
        after = history.accepted(tokens, case.new_lens, step.accepted or (0,) * case.batch_size)
    else:
        quantities["state"] = _conditioned(("request", "head", "key row"), right.final, after.base, sizes.final)
    if any(case.track_lens):
        snapshot = _snapshot(world, step, history, q, k, v, context.slopes[layer].to(place).double())
        taken = [r for r, track in enumerate(case.track_lens) if track]
        size = (snapshot.plain + snapshot.weighted)[taken]
        quantities["snapshot"] = _conditioned(("snapshot", "head", "key row"), snapshot.right[taken], snapshot.base[taken], size)
        world.histories.snapshot(layer, snapshot)
    world.histories.leave(index, layer, after)
    return quantities


def _recurrences(
    world: World, step: StepData, history: History, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, whole: Case | None = None
) -> tuple[DecayedStateResult, DecayedStateResult, DecayedStateResult]:
    """The right results, the baseline's (float32, ``out`` in the case's dtype) and their sizes; tokens are kept in target_verify.
    ``whole``: the batch that these tokens were cut from, whose roundings they meet."""
    case, scale = step.case, world.context.scale
    trees = [case.tree(r) for r in range(case.batch_size)] if case.trees else None
    plain = {"slopes": slopes, "new_lens": case.new_lens, "scale": scale, "trees": trees}
    plain["keep_tokens"] = case.forward is ForwardMode.TARGET_VERIFY
    right = decayed_state_attention(q, k, v, history.right, **plain)  # type: ignore[arg-type]
    sizes = decayed_state_sizes(q, k, v, history.plain, weighted=history.weighted, **plain)  # type: ignore[arg-type]
    base = decayed_state_attention(q, k, v, history.base, dtype=torch.float32, **plain)  # type: ignore[arg-type]
    base_out, base_final = base.out.to(world.dtype), base.final
    steps = world.conventions.rounding_of(whole or case, world.device.type)
    if steps and trees is None:
        rounded = chunked_decay(steps, q, k, v, history.base, slopes, case.new_lens, scale)
        base_out, base_final = rounded.out, rounded.final if STATE_STEPS & steps else base_final
    if plain["keep_tokens"]:
        return right, replace(base, out=base_out, final=base_final), sizes
    return replace(right, tokens=None), replace(base, out=base_out, final=base_final, tokens=None), replace(sizes, tokens=None)


def _snapshot(world: World, step: StepData, history: History, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> History:
    """The states after each request's first ``track_lens`` new tokens; what it started from where that is 0."""
    case = step.case
    starts = [sum(case.new_lens[:request]) for request in range(case.batch_size)]
    at = [start + token for start, track in zip(starts, case.track_lens, strict=True) for token in range(track)]
    cut = replace(step, case=case.but(new_lens=case.track_lens, track_lens=(), forward=ForwardMode.EXTEND))
    right, base, sizes = _recurrences(world, cut, history, q[at], k[at], v[at], slopes, case)
    assert world.context.states is not None
    return History(right.final, base.final.to(world.context.states.dtype).float(), *sizes.final_parts)


def _conditioned(labels: tuple[str, ...], reference: Tensor, baseline: Tensor, absolute: Tensor) -> Quantity:
    """Conditioning of a sum: the same sum over absolute values, relative to the row's own size."""
    size = reference.square().mean(dim=-1).sqrt()
    conditioning = absolute.square().mean(dim=-1).sqrt() / torch.where(size > 0, size, 1.0)
    return Quantity(labels, reference, baseline, conditioning)
