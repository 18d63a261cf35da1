"""Cache values scaled or rounded on the way out of the pool."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import ForwardMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import EXTEND, always, extends, plant

KEY_SCALE, VALUE_SCALE = 0.25, 0.5


class Scaled(SoftmaxSubject):
    """Holds scales; the payload of a slot is ``stored / scale`` and is multiplied by the scale on read where ``scales`` says so."""

    def read(self, slots: Tensor, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        keys, values = (tensor.float() for tensor in super().read(slots, layer, batch))
        key_scale, value_scale = (KEY_SCALE, VALUE_SCALE) if self.scales(batch) else (1.0, 1.0)
        return keys / KEY_SCALE * key_scale, values / VALUE_SCALE * value_scale

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
        return keys, values.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()


class ValuesFromKeys(SoftmaxSubject):
    def read(self, slots: Tensor, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        keys, _ = super().read(slots, layer, batch)
        return keys, keys


class LayerZeroRead(SoftmaxSubject):
    def read(self, slots: Tensor, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().read(slots, 0, batch)


plant("B104", "the cache's scales left out in extend", NoScaleInExtend, extends, EXTEND, healthy=Scaled, like=("B105",))
plant("B105", "the cache's scales taken for 1", ScaleFieldUnset, always, healthy=Scaled, like=("B104",))
plant("X46", "values rounded to fp8", ValuesThroughFp8, always, kind="kv-quant", title="Values pass through fp8")
plant("X47", "values read from the pool of the keys", ValuesFromKeys, always, kind="page-index", title="V read from K's page")
plant("X48", "layer 0's keys and values read for layer 1", LayerZeroRead, always, kind="page-index", title="Layer 0 read for layer 1")
