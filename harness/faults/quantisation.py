"""Cache values scaled or rounded on the way into or out of the pool."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case, ForwardMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import Plan, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import EXTEND, always, extends, has_prefix, plant

KEY_SCALE, VALUE_SCALE = 0.25, 0.5
FP8 = torch.float8_e4m3fn
LARGEST, BEYOND = 448.0, 464.0  # largest value; what lies beyond half a step more has no neighbour to be rounded to


class Scaled(SoftmaxSubject):
    """Multiplies by the cache's scales where ``scales`` says so; of a cache that has none, it takes the payload of a slot for
    ``stored / scale``."""

    def read(self, slots: Tensor, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        keys, values = (tensor.float() for tensor in super().read(slots, layer, batch))
        if self.context.k_scales:
            return keys, values
        key_scale, value_scale = (KEY_SCALE, VALUE_SCALE) if self.scales(batch) else (1.0, 1.0)
        return keys / KEY_SCALE * key_scale, values / VALUE_SCALE * value_scale

    def kv_scales(self, layer: int, batch: Batch) -> tuple[float, float]:
        return super().kv_scales(layer, batch) if self.scales(batch) else (1.0, 1.0)

    def scales(self, batch: Batch) -> bool:
        return True


class NoScaleInExtend(Scaled):
    def scales(self, batch: Batch) -> bool:
        return batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED)


class ScaleFieldUnset(Scaled):
    def scales(self, batch: Batch) -> bool:
        return False


class ValuesThroughFp8(SoftmaxSubject):
    def read(self, slots: Tensor, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        keys, values = super().read(slots, layer, batch)
        return keys, values.float().clamp(-LARGEST, LARGEST).to(FP8).float()


class ScalesExchanged(SoftmaxSubject):
    def kv_scales(self, layer: int, batch: Batch) -> tuple[float, float]:
        k_scale, v_scale = super().kv_scales(layer, batch)
        return v_scale, k_scale


class ScalesTwice(SoftmaxSubject):
    def kv_scales(self, layer: int, batch: Batch) -> tuple[float, float]:
        k_scale, v_scale = super().kv_scales(layer, batch)
        return k_scale**2, v_scale**2


class ScalesOfLayerZero(SoftmaxSubject):
    def kv_scales(self, layer: int, batch: Batch) -> tuple[float, float]:
        return super().kv_scales(0, batch)


class CachedInOtherScale(SoftmaxSubject):
    """What earlier steps cached was written under other scales than those of now: half of them."""

    def read(self, slots: Tensor, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        keys, values = super().read(slots, layer, batch)
        cached = torch.arange(slots.shape[1], device=slots.device) < self.prefix(batch.attn_metadata)[:, None]
        factor = torch.where(cached, 2.0, 1.0)[..., None, None]
        return keys * factor, values * factor


class NewKeysUnquantised(SoftmaxSubject):
    """Attention over the new tokens reads the keys and values it was given, not those in the cache; they are quantised for later."""

    new: tuple[Tensor, Tensor]

    def write(self, k: Tensor, v: Tensor, layer: int, batch: Batch) -> None:
        self.new = k, v
        super().write(k, v, layer, batch)

    def read(self, slots: Tensor, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        plan: Plan = batch.attn_metadata
        starts, index = plan.cu_seqlens_q.long(), torch.arange(slots.shape[1], device=slots.device)
        own = index - self.prefix(plan)[:, None]
        fresh = ((own >= 0) & (own < starts.diff()[:, None]))[..., None, None]
        token = (starts[:-1, None] + own).clamp(0, max(0, batch.num_tokens - 1))
        keys, values = super().read(slots, layer, batch)
        if not batch.num_tokens:
            return keys, values
        return torch.where(fresh, self.new[0][token].float(), keys), torch.where(fresh, self.new[1][token].float(), values)


class QuantisingWriter(SoftmaxSubject):
    """Quantises by itself on the way into the pool."""

    def write(self, k: Tensor, v: Tensor, layer: int, batch: Batch) -> None:
        kv = self.context.kv
        assert kv is not None
        page, offset = batch.out_loc // kv.page_size, batch.out_loc % kv.page_size
        scales = self.write_scales(layer)
        for pool, given, scale in ((kv.k(layer), k, scales[0]), (kv.v(layer), v, scales[1])):
            kv.by_page(pool)[page, offset] = self.rounded(given.float() / scale)

    def write_scales(self, layer: int) -> tuple[float, float]:
        return self.context.k_scale(layer), self.context.v_scale(layer)

    def rounded(self, values: Tensor) -> Tensor:
        """fp8 values, saturating."""
        return values.clamp(-LARGEST, LARGEST).to(FP8)


class WrittenWithoutScale(QuantisingWriter):
    def write_scales(self, layer: int) -> tuple[float, float]:
        return 1.0, 1.0


class WrittenTruncated(QuantisingWriter):
    def rounded(self, values: Tensor) -> Tensor:
        near = super().rounded(values)
        beyond = (near.float().abs() > values.abs()).to(torch.uint8)
        return (near.view(torch.uint8) - beyond).view(FP8)


class WrittenWithoutSaturation(QuantisingWriter):
    """Rounded past the largest value, where the format has NaN."""

    def rounded(self, values: Tensor) -> Tensor:
        nan = torch.full_like(values, float("nan")).to(FP8).view(torch.uint8)
        return torch.where(values.abs() > BEYOND, nan, super().rounded(values).view(torch.uint8)).view(FP8)


class ValuesFromKeys(SoftmaxSubject):
    def read(self, slots: Tensor, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        keys, _ = super().read(slots, layer, batch)
        return keys, keys


class LayerZeroRead(SoftmaxSubject):
    def read(self, slots: Tensor, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().read(slots, 0, batch)


def _quantised(case: Case) -> bool:
    return case.kv_dtype is not None


plant("B104", "the cache's scales left out in extend", NoScaleInExtend, extends, EXTEND, healthy=Scaled, like=("B105",))
plant("B105", "the cache's scales taken for 1", ScaleFieldUnset, always, healthy=Scaled, like=("B104",))
plant("X46", "values rounded to fp8", ValuesThroughFp8, always, kind="kv-quant", title="Values pass through fp8")
plant("X47", "values read from the pool of the keys", ValuesFromKeys, always, kind="page-index", title="V read from K's page")
plant("X48", "layer 0's keys and values read for layer 1", LayerZeroRead, always, kind="page-index", title="Layer 0 read for layer 1")
plant("X90", "the scales of keys and values exchanged", ScalesExchanged, _quantised, kind="kv-quant", title="Key and value scale exchanged")
plant("X91", "the cache's scales applied twice", ScalesTwice, _quantised, kind="kv-quant", title="Scales applied twice")
plant("X92", "layer 0's scales applied in layer 1", ScalesOfLayerZero, _quantised, kind="kv-quant", title="Layer 0's scales for layer 1")
plant("X93", "cached keys and values under twice the scales of new ones", CachedInOtherScale,
      lambda case: _quantised(case) and has_prefix(case), kind="kv-quant", title="Prefix cached under other scales")  # fmt: skip
plant("X94", "new keys and values read before they were quantised", NewKeysUnquantised, _quantised, kind="kv-quant",
      title="New keys and values read unquantised")  # fmt: skip
plant(
    "X95", "keys and values cached without their scales", WrittenWithoutScale, _quantised, kind="kv-quant", title="Scale ignored on write"
)
plant("X96", "keys and values truncated to fp8", WrittenTruncated, _quantised, kind="kv-quant", title="Quantised by truncation")
plant("X97", "what lies beyond the range of fp8 cached as NaN", WrittenWithoutSaturation, _quantised, kind="kv-quant",
      title="Quantised without saturation")  # fmt: skip
