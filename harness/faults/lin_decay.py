"""Faults of the decay rates, and of how often a decay is applied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.fault import NotInjected, add
from attnmatrix.harness.faults.lightning_subject import CHUNK, LightningSubject, StatePlan
from attnmatrix.harness.faults.lin_where import (
    DECODES,
    EXTENDS,
    VERIFIES,
    decodes,
    extends,
    extends_prefix,
    has_prefix,
    plant,
    remembers,
    rows,
    verifies,
)
from attnmatrix.references.slopes import lightning_slopes


class Rates(LightningSubject):
    """Other decay rates: ``rates`` maps the right ones ``[layers, H]`` and a layer to those used ``[H]``."""

    def slopes(self, layer: int) -> Tensor:
        assert self.context.slopes is not None
        return self.rates(self.context.slopes, layer)

    def rates(self, slopes: Tensor, layer: int) -> Tensor:
        raise NotImplementedError

    def formula(self, heads: int, layer: int) -> Tensor:
        return lightning_slopes(heads, layer, self.context.num_layers).float().to(self.context.device)


class LocalHeads(Rates):
    """Two ranks, each of which builds the slopes of half the heads from index 0."""

    def rates(self, slopes: Tensor, layer: int) -> Tensor:
        return self.formula(self.context.heads.q // 2, layer).repeat(2)


class PowerOfTwo(Rates):
    """A head count that is no power of two takes the first slopes of the next one."""

    def rates(self, slopes: Tensor, layer: int) -> Tensor:
        heads = self.context.heads.q
        return self.formula(1 << (heads - 1).bit_length(), layer)[:heads]


class OtherLayer(Rates):
    def rates(self, slopes: Tensor, layer: int) -> Tensor:
        return slopes[1 - layer]


class UnscaledLayer(Rates):
    """The factor of the layer left out."""

    def rates(self, slopes: Tensor, layer: int) -> Tensor:
        return slopes[0]


class Reversed(Rates):
    def rates(self, slopes: Tensor, layer: int) -> Tensor:
        return slopes[layer].flip(0)


class FirstHead(Rates):
    def rates(self, slopes: Tensor, layer: int) -> Tensor:
        return slopes[layer, :1].expand(slopes.shape[1])


class Strided(Rates):
    """A flat index with twice the head stride, cut at the buffer's end."""

    def rates(self, slopes: Tensor, layer: int) -> Tensor:
        index = layer * slopes.shape[1] + 2 * torch.arange(slopes.shape[1], device=slopes.device)
        return slopes.flatten()[index.clamp(max=slopes.numel() - 1)]


class OnePercent(Rates):
    def rates(self, slopes: Tensor, layer: int) -> Tensor:
        return slopes[layer] * 1.01


class Halved(Rates):
    def rates(self, slopes: Tensor, layer: int) -> Tensor:
        return slopes[layer] * 0.5


class NoDecay(Rates):
    def rates(self, slopes: Tensor, layer: int) -> Tensor:
        return torch.zeros_like(slopes[layer])


class RoundedGate(LightningSubject):
    """The factor of one token rounded to bf16 and back before it meets the state."""

    def step(self, before: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        gate = torch.exp(-self.slopes(layer)).bfloat16().float()
        return before * gate[None, :, None, None] + k[..., :, None] * v[..., None, :]


class DecayAfterUpdate(LightningSubject):
    """The new token decays with the rest."""

    def step(self, before: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        after = before + k[..., :, None] * v[..., None, :]
        return after * torch.exp(-self.slopes(layer))[None, :, None, None]


class FadedStart(LightningSubject):
    """The state that an extend starts from has decayed by ``extra`` tokens too many (negative: too few)."""

    def extra(self, row: int, plan: StatePlan) -> float:
        raise NotImplementedError

    def initial_state(self, row: int, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        state = super().initial_state(row, layer, plan, batch)
        return state * torch.exp(-self.slopes(layer) * self.extra(row, plan))[:, None, None]


class OneTooFew(FadedStart):
    def extra(self, row: int, plan: StatePlan) -> float:
        return -1


class OneTooMany(FadedStart):
    def extra(self, row: int, plan: StatePlan) -> float:
        return 1


class PackedChunkStart(FadedStart):
    """A request that begins inside a chunk of the packed batch decays from the chunk's first token."""

    def extra(self, row: int, plan: StatePlan) -> float:
        return sum(plan.new_lens[:row]) % CHUNK


class TailSummedTwice(FadedStart):
    """The gates of the prefix's unfinished chunk were saved summed and are summed once more."""

    def extra(self, row: int, plan: StatePlan) -> float:
        tail = plan.prefix_lens[row] % CHUNK
        return tail * (tail - 1) / 2


class DecodeTwice(LightningSubject):
    def gather(self, layer: int, plan: StatePlan) -> Tensor:
        return super().gather(layer, plan) * torch.exp(-self.slopes(layer))[None, :, None, None]


class VerifyUndecayed(LightningSubject):
    """The first draft token meets the live state undecayed."""

    def gather(self, layer: int, plan: StatePlan) -> Tensor:
        state = super().gather(layer, plan)
        return state if plan.parents is None else state * torch.exp(self.slopes(layer))[None, :, None, None]


def _starts_inside_chunk(batch: Case) -> bool:
    starts = [sum(batch.new_lens[:row]) % CHUNK for row in range(batch.batch_size)]
    return extends(batch) and any(p and n and s for p, n, s in zip(batch.prefix_lens, batch.new_lens, starts, strict=True))


def _heads(rule: Callable[[int], bool]) -> Callable[[Case], bool]:
    return lambda batch: remembers(batch) and rule(batch.heads.q)


KIND = "lin-decay"
plant("B70-decay", "score-mod", "Decay rates computed from the local head count",
      "decay rates built for half the heads and used for both halves", LocalHeads, _heads(lambda n: n % 2 == 0),
      source="flashinfer-ai/flashinfer#5101")  # fmt: skip
add(NotInjected("B101", "strides", "Gate tensors turn into strided views for one head ratio", "pending",
    "waits for per-token gates (gdn); its index error on Lightning's rates is Y29"))  # fmt: skip
plant("B123", "lin-chunk", "Decay counted from the chunk start when a sequence begins mid-chunk",
      "the cached state decayed from the start of the packed batch's chunk", PackedChunkStart, _starts_inside_chunk, EXTENDS,
      "vllm-project/vllm#23279")  # fmt: skip
plant("B125", "lin-chunk", "Partial-chunk gates saved after the cumulative sum",
      "the decays of the prefix's unfinished chunk summed twice", TailSummedTwice,
      lambda b: extends(b) and any(p % CHUNK > 1 for p, _ in rows(b)), EXTENDS, "fla-org/flash-linear-attention#1176")  # fmt: skip
plant("B141", "precision", "Gate rounded to bf16 before the state update", "the decay factor rounded to bf16",
      RoundedGate, lambda b: decodes(b) or verifies(b), (*DECODES, *VERIFIES), "sgl-project/sglang#38975")  # fmt: skip
plant("Y22", KIND, "Decay of the other layer", "the decay rates of the other layer", OtherLayer, remembers)
plant("Y23", KIND, "Layer factor left out", "layer 0's decay rates in every layer", UnscaledLayer, remembers)
plant("Y24", KIND, "Slopes of the next power of two", "decay rates of the next power of two of heads",
      PowerOfTwo, _heads(lambda n: n & (n - 1) != 0))  # fmt: skip
plant("Y25", KIND, "Heads' decay rates reversed", "the heads' decay rates in reverse order", Reversed, _heads(lambda n: n > 1))
plant("Y26", KIND, "One decay rate for all heads", "the first head's decay rate in every head", FirstHead, _heads(lambda n: n > 1))
plant("Y27", KIND, "Decay rates 1 % too large", "decay rates 1 % too large", OnePercent, remembers)
plant("Y28", KIND, "Decay rates halved", "half the decay rates", Halved, remembers)
plant("Y29", KIND, "Decay rates read with twice the stride", "the decay rate of head 2h in head h", Strided, _heads(lambda n: n > 1))
plant("Y30", KIND, "No decay", "no decay", NoDecay, remembers)
plant("Y31", KIND, "Decay after the update", "the new token decayed with the state", DecayAfterUpdate,
      lambda b: decodes(b) or verifies(b), (*DECODES, *VERIFIES))  # fmt: skip
plant(
    "Y32",
    KIND,
    "Initial state decayed once too little",
    "the cached state decayed by one token too few",
    OneTooFew,
    extends_prefix,
    EXTENDS,
)
plant("Y33", KIND, "Initial state decayed once too often", "the cached state decayed by one token too many", OneTooMany, extends_prefix, EXTENDS,
      like=("B123",))  # fmt: skip
plant("Y34", KIND, "Decode decays twice", "the state decayed twice in decode or verify", DecodeTwice,
      lambda b: (decodes(b) or verifies(b)) and has_prefix(b), (*DECODES, *VERIFIES))  # fmt: skip
plant("Y35", KIND, "First draft meets the undecayed state", "the first draft token added to the undecayed state", VerifyUndecayed,
      verifies, VERIFIES)  # fmt: skip
