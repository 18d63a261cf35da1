"""The data of every batch of a world: hidden stream, planned queries, keys and values, and what each request has cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.placement import shared_prefix_len
from attnmatrix.cases.schedule import Schedule
from attnmatrix.harness.dtypes import TORCH_DTYPES
from attnmatrix.harness.lowered import Lowered
from attnmatrix.harness.probes import Probe, needle_queries, orthogonal_keys, peaked

NUM_LAYERS = 2
HIDDEN = 64  # width of the two-layer model's residual stream


@dataclass(frozen=True)
class LayerInputs:
    """Planned inputs of one layer for all new tokens of a step: ``q`` ``[T, Hq, D]``, ``k``, ``v`` ``[T, Hkv, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Prefix:
    """What one request has cached before a step: keys and values per layer ``[P, Hkv, D]``, or states per layer ``[H, K, V]``.

    On the CPU: the pool holds the device's copy.
    """

    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()
    states: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class StepData:
    """One batch of the schedule with its data. ``requests`` numbers its requests over the whole world."""

    case: Case
    requests: range
    hidden: Tensor
    inputs: tuple[LayerInputs, ...]
    prefixes: tuple[Prefix, ...]
    follows: str = ""  # see cases.schedule.Step
    accepted: tuple[int, ...] | None = None


def extended(step: StepData, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Prefix, ...]:
    """What each request has cached after a step that was given ``keys`` and ``values`` ``[T, Hkv, D]`` per layer, on the CPU; states
    stay as they are."""
    prefixes, start = [], 0
    for before, new in zip(step.prefixes, step.case.new_lens, strict=True):
        rows = slice(start, start + new)
        start += new
        cached = [
            tuple(torch.cat([old, given[rows]]) for old, given in zip(drawn, now, strict=True))
            for drawn, now in ((before.keys, keys), (before.values, values))
            if drawn
        ]
        prefixes.append(Prefix(*cached) if cached else before)
    return tuple(prefixes)


class Draws:
    """Draws from one generator on the CPU, so that every device gets the same numbers."""

    def __init__(self, probe: Probe, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> None:
        self.probe, self.generator, self.dtype, self.device = probe, generator, dtype, device

    def steps(self, planned: Schedule) -> tuple[StepData, ...]:
        """The batches with their data. What a batch that follows another has cached is what was planned for those before; states that it
        starts from are told by the history."""
        steps: list[StepData] = []
        for plan, requests in zip(planned.steps, planned.requests, strict=True):
            batch = plan.case
            continued = bool(plan.follows) and not plan.recycles
            if continued and batch.kind is AttentionKind.SOFTMAX:
                given = steps[-1].inputs
                prefixes = extended(steps[-1], [layer.k.cpu() for layer in given], [layer.v.cpu() for layer in given])
            else:
                prefixes = self._prefixes(batch, drawn=not continued)
            inputs = tuple(self._layer_inputs(batch, prefixes, layer) for layer in range(NUM_LAYERS))
            hidden = torch.randn(batch.num_tokens, HIDDEN, generator=self.generator).to(self.dtype).to(self.device)
            steps.append(StepData(batch, requests, hidden, inputs, prefixes, plan.follows, plan.accepted))
        return tuple(steps)

    def _draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (peaked(shape, self.generator) * scale).to(self.dtype)

    def _keys(self, batch: Case, count: int) -> Tensor:
        keys, lowered = self._draw(count, batch.heads.kv, batch.heads.dim), Lowered.of(batch)
        return keys if lowered is None else lowered.keys(keys)

    def _layer_inputs(self, batch: Case, prefixes: tuple[Prefix, ...], layer: int) -> LayerInputs:
        heads, tokens = batch.heads, batch.num_tokens
        q = self._draw(tokens, heads.q, heads.dim, scale=batch.gain)
        k, v = self._draw(tokens, heads.kv, heads.dim), self._draw(tokens, heads.kv, heads.dim)
        lowered = Lowered.of(batch)
        if lowered is not None:
            q, k = lowered.queries(q), lowered.keys(k)
        if self.probe.inputs != "needle":
            return self._placed(q, k, v)
        if batch.kind is not AttentionKind.SOFTMAX:
            queries, keys = orthogonal_keys(batch, self.generator)
            return self._placed(queries.to(self.dtype), keys.to(self.dtype), v)
        starts = [sum(batch.new_lens[:r]) for r in range(batch.batch_size)]
        every = [torch.cat([prefixes[r].keys[layer], k[start : start + batch.new_lens[r]]]) for r, start in enumerate(starts)]
        aligned = [needle_queries(batch, r, own if lowered is None else lowered.plain(own)) for r, own in enumerate(every)]
        queries = torch.cat([q[:0].float(), *aligned])
        return self._placed((queries if lowered is None else lowered.queries(queries)).to(self.dtype), k, v)

    def _placed(self, *planned: Tensor) -> LayerInputs:
        return LayerInputs(*(tensor.to(self.device) for tensor in planned))

    def _prefixes(self, batch: Case, drawn: bool) -> tuple[Prefix, ...]:
        heads = batch.heads
        prefixes: list[Prefix] = []
        if batch.kind is not AttentionKind.SOFTMAX:
            for length in batch.prefix_lens:
                scale = batch.state_scale if length and drawn else 0.0
                shape = (heads.q, heads.dim, heads.dim)
                held = TORCH_DTYPES[batch.state_dtype or "fp32"]
                states = [torch.randn(shape, generator=self.generator) * scale if drawn else torch.zeros(shape) for _ in range(NUM_LAYERS)]
                prefixes.append(Prefix(states=tuple(state.to(held).float() for state in states)))
            return tuple(prefixes)
        common = shared_prefix_len(batch)
        donor: Prefix | None = None
        for length in batch.prefix_lens:
            keys = tuple(self._keys(batch, length) for _ in range(NUM_LAYERS))
            values = tuple(self._draw(length, heads.kv, heads.dim) for _ in range(NUM_LAYERS))
            if common and length >= batch.page_size:
                if donor is None:
                    donor = Prefix(keys, values)
                for layer in range(NUM_LAYERS):
                    keys[layer][:common] = donor.keys[layer][:common]
                    values[layer][:common] = donor.values[layer][:common]
            prefixes.append(Prefix(keys, values))
        return tuple(prefixes)
