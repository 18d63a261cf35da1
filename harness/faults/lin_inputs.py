"""Faults of what a token's query, key and value are taken from, and of the scale."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnmatrix.cases.case import Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.lightning_subject import LightningSubject, StatePlan
from attnmatrix.harness.faults.lin_where import EXTENDS, decodes, extends, has_tokens, plant, verifies


class DecodesTakenLast(LightningSubject):
    """Decode rows come first, but their tokens and slots are taken from behind the prefill part."""

    def extend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        decoding = leading_decodes(plan.prefix_lens, plan.new_lens)
        rest = len(plan.new_lens) - decoding
        if not decoding or not rest or batch.forward_mode is not ForwardMode.MIXED:
            return super().extend(q, k, v, layer, plan, batch)
        out = torch.full_like(q, float("nan"))
        tail = replace(
            plan, state_indices=plan.state_indices[decoding:], prefix_lens=plan.prefix_lens[decoding:], new_lens=plan.new_lens[decoding:]
        )
        out[decoding:] = super().extend(q[decoding:], k[decoding:], v[decoding:], layer, tail, batch)
        tokens, slots = q.shape[0] - decoding, replace(plan, state_indices=plan.state_indices[rest:])
        after = self.step(self.gather(layer, slots), k[tokens:], v[tokens:], layer)
        self.scatter(after, layer, slots)
        out[:decoding] = torch.einsum("rhd,rhde->rhe", q[tokens:], after)
        return out


class ReversedStarts(LightningSubject):
    """Query offsets from the lengths in another order than the rows'."""

    def extend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        lens = plan.new_lens
        starts = [sum(lens[::-1][:row]) for row in range(len(lens))]
        fits = tuple(min(new, q.shape[0] - start) for new, start in zip(lens, starts, strict=True))
        order = torch.cat([torch.arange(start, start + new) for start, new in zip(starts, fits, strict=True)]).to(q.device)
        out = torch.full_like(q, float("nan"))
        out[order] = super().extend(q[order], k[order], v[order], layer, replace(plan, new_lens=fits), batch)
        return out

    def plan(self, batch: Batch) -> StatePlan:
        plan = super().plan(batch)
        if plan.parents is None:
            return plan
        starts = torch.tensor([0, *plan.new_lens[::-1]]).cumsum(0).int().to(self.context.device)
        return replace(plan, cu_seqlens_q=starts)


class Swapped(LightningSubject):
    """Query and key exchanged."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(k, q, v, layer_id, batch)


class Unscaled(LightningSubject):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward((q.float() / self.context.scale).to(q.dtype), k, v, layer_id, batch)


class ScaledTwice(LightningSubject):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return (super().forward(q.float(), k, v, layer_id, batch) * self.context.scale).to(q.dtype)


class ScaledByHalfDim(LightningSubject):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return (super().forward(q.float(), k, v, layer_id, batch) * 2**0.5).to(q.dtype)


class RolledKeys(LightningSubject):
    """Each head works on the keys of the head before it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q, k.roll(1, dims=1), v, layer_id, batch)


class RolledValues(LightningSubject):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q, k, v.roll(1, dims=1), layer_id, batch)


class TakenForContiguous(LightningSubject):
    """Views read with the strides of a contiguous tensor."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(_packed(q), _packed(k), _packed(v), layer_id, batch)


class RoundedQueries(LightningSubject):
    """Queries rounded to bf16 after scaling."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        scaled = (q.float() * self.context.scale).bfloat16().float() / self.context.scale
        return super().forward(scaled, k, v, layer_id, batch).to(q.dtype)


class NeighbourToken(LightningSubject):
    """Decode takes the value of the next row's token."""

    def decode(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        return super().decode(q, k, v.roll(1, dims=0), layer, plan, batch)


def _packed(view: Tensor) -> Tensor:
    return torch.as_strided(view, view.shape, (view.shape[1] * view.shape[2], view.shape[2], 1), view.storage_offset())


def leading_decodes(prefixes: tuple[int, ...], news: tuple[int, ...]) -> int:
    """How many of the first rows continue a request by one token."""
    count = 0
    for prefix, new in zip(prefixes, news, strict=True):
        if not prefix or new != 1:
            break
        count += 1
    return count


def _decodes_first(batch: Case) -> bool:
    return batch.forward is ForwardMode.MIXED and 0 < leading_decodes(batch.prefix_lens, batch.new_lens) < batch.batch_size


def _uneven(batch: Case) -> bool:
    return (extends(batch) or verifies(batch)) and batch.new_lens != batch.new_lens[::-1]


def _strided(batch: Case) -> bool:
    return batch.strided and batch.num_tokens > 1


def _several_heads(batch: Case) -> bool:
    return has_tokens(batch) and batch.heads.q > 1


KIND = "lin-inputs"
plant("B144", "batch-order", "Decode slice taken after the prefill part in a decode-first batch",
      "the decode rows of a mixed batch taken from behind its prefill tokens", DecodesTakenLast, _decodes_first, EXTENDS,
      "vllm-project/vllm#40859")  # fmt: skip
plant("B146", "batch-order", "Row order taken from a dictionary, not from the batch", "query offsets from lengths in reverse order",
      ReversedStarts, _uneven, (*EXTENDS, RunnerMode.VERIFY), "vllm-project/vllm#14645")  # fmt: skip
plant("Y71", KIND, "Query and key exchanged", "query and key exchanged", Swapped, has_tokens)
plant("Y72", "scale", "Scale missing", "no scale", Unscaled, has_tokens)
plant("Y73", "scale", "Scale applied twice", "the scale applied twice", ScaledTwice, has_tokens)
plant("Y74", "scale", "Scale of half the head dim", "the scale of half the head dim", ScaledByHalfDim, has_tokens)
plant("Y75", KIND, "Keys of the next head", "each head given the keys of the head before it", RolledKeys, _several_heads)
plant("Y76", KIND, "Values of the next head", "each head given the values of the head before it", RolledValues, _several_heads)
plant("Y77", "strides", "Views read as if contiguous", "strided views read as if contiguous", TakenForContiguous, _strided)
plant("Y78", KIND, "Value of the neighbouring request", "decode given the value of the request before it", NeighbourToken,
      lambda b: decodes(b) and b.batch_size > 1, (RunnerMode.EAGER, RunnerMode.CG_DECODE))  # fmt: skip
plant(
    "Y79",
    "precision",
    "Scaled queries rounded to bf16",
    "scaled queries rounded to bf16",
    RoundedQueries,
    lambda b: b.dtype == "fp32" and has_tokens(b),
)
