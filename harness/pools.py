"""The KV pool and the recurrent-state pool, fenced by canaries."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from attnmatrix.harness.quantise import quantise

FENCE = 256  # elements before and after each buffer
CANARY = {1: 0x5A, 2: 0x5A5A, 4: 0x5A5A5A5A, 8: 0x5A5A5A5A5A5A5A5A}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bit patterns as signed integers, for comparisons in which NaN equals itself."""
    return tensor.view(_BITS[tensor.element_size()]) if tensor.dtype.is_floating_point else tensor


class Fenced:
    """A contiguous tensor with canary elements on both sides of it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        count = 1
        for extent in shape:
            count *= extent
        self._whole = torch.empty(count + 2 * FENCE, dtype=dtype, device=device)
        bits(self._whole).fill_(CANARY[self._whole.element_size()])
        self.tensor = self._whole[FENCE : FENCE + count].view(shape)

    def broken(self) -> bool:
        """Whether a canary changed: something wrote out of bounds."""
        whole = bits(self._whole)
        count = whole.numel()
        edges = torch.cat([whole[:FENCE], whole[count - FENCE :]])
        return bool((edges != CANARY[self._whole.element_size()]).any())


class KVPool:
    """Paged keys and values of every layer: ``num_pages * page_size`` slots.

    ``k(layer)`` and ``v(layer)`` are the physical tensors in the row's layout (NHD ``[pages, page, H, D]``, HND
    ``[pages, H, page, D]``); with ``interleaved`` they are the two halves of ``kv(layer)`` ``[pages, 2, page, H, D]``.
    With ``scales``, a key's and a value's per layer, the pool is quantised: it holds what it is given divided by them.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        heads: int,
        dim: int,
        layers: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: str,
        scales: Sequence[tuple[float, float]] = (),
    ) -> None:
        self.num_pages, self.page_size, self.layout, self.dtype = num_pages, page_size, layout, dtype
        self._scales = tuple(scales)
        shape = (num_pages, page_size, heads, dim) if layout != "HND" else (num_pages, heads, page_size, dim)
        self._both: list[Fenced] = []
        if layout == "interleaved":
            self._both = [Fenced((num_pages, 2, page_size, heads, dim), dtype, device) for _ in range(layers)]
            self.fenced = list(self._both)
            self._k = [fenced.tensor[:, 0] for fenced in self._both]
            self._v = [fenced.tensor[:, 1] for fenced in self._both]
        else:
            keys = [Fenced(shape, dtype, device) for _ in range(layers)]
            values = [Fenced(shape, dtype, device) for _ in range(layers)]
            self.fenced = keys + values
            self._k = [fenced.tensor for fenced in keys]
            self._v = [fenced.tensor for fenced in values]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def k(self, layer: int) -> Tensor:
        return self._k[layer]

    def v(self, layer: int) -> Tensor:
        return self._v[layer]

    def kv(self, layer: int) -> Tensor:
        """``[pages, 2, page, H, D]``; only with the interleaved layout."""
        return self._both[layer].tensor

    def reversed_layers(self) -> KVPool:
        """The same memory with the layers in reverse order."""
        other = copy.copy(self)
        other._k, other._v = self._k[::-1], self._v[::-1]
        other._both = self._both[::-1]
        other._scales = self._scales[::-1]
        return other

    def snapshot(self) -> KVPool:
        """What the pool holds now, in memory of its own and without fences."""
        other = copy.copy(self)
        other._k, other._v = [k.clone() for k in self._k], [v.clone() for v in self._v]
        other.fenced, other._both = [], []
        return other

    @property
    def quantised(self) -> bool:
        """Whether what the pool holds is to be multiplied by scales."""
        return bool(self._scales)

    def as_held(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values in the pool's dtype, quantised by the layer's scales where it has any."""
        if not self._scales:
            return k.to(self.dtype), v.to(self.dtype)
        k_scale, v_scale = self._scales[layer]
        return quantise(k, k_scale, self.dtype), quantise(v, v_scale, self.dtype)

    def by_page(self, tensor: Tensor) -> Tensor:
        """A physical tensor seen as ``[pages, page, H, D]`` whatever its layout."""
        return tensor.transpose(1, 2) if self.layout == "HND" else tensor

    def store(self, layer: int, out_loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Write ``k``, ``v`` ``[T, H, D]`` at the slots ``out_loc`` int64 ``[T]``; safe to capture in a graph."""
        page, offset = out_loc // self.page_size, out_loc % self.page_size
        held_k, held_v = self.as_held(layer, k, v)
        self.by_page(self._k[layer])[page, offset] = held_k
        self.by_page(self._v[layer])[page, offset] = held_v


class StatePool:
    """Recurrent states of every layer, one slot per request; slot -1 means padding and is never touched.

    ``state(layer)`` is ``[slots, H, K, V]`` (KV layout) or ``[slots, H, V, K]`` (VK). ``intermediate(layer)``
    ``[max_reqs, drafts, H, K, V]`` (or V, K) receives the state after each draft token in target_verify, by batch row.
    """

    def __init__(
        self,
        slots: int,
        heads: int,
        dim: int,
        layers: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: str,
        max_reqs: int,
        drafts: int,
    ) -> None:
        self.layout, self.dtype, self.num_slots = layout, dtype, slots
        live = [Fenced((slots, heads, dim, dim), dtype, device) for _ in range(layers)]
        drafted = [Fenced((max_reqs, drafts, heads, dim, dim), dtype, device) for _ in range(layers)]
        self.fenced = live + drafted
        self._live = [fenced.tensor for fenced in live]
        self._drafted = [fenced.tensor for fenced in drafted]

    def state(self, layer: int) -> Tensor:
        return self._live[layer]

    def intermediate(self, layer: int) -> Tensor:
        return self._drafted[layer]

    def reversed_layers(self) -> StatePool:
        """The same memory with the layers in reverse order."""
        other = copy.copy(self)
        other._live, other._drafted = self._live[::-1], self._drafted[::-1]
        return other

    def snapshot(self) -> StatePool:
        """What the pool holds now, in memory of its own and without fences."""
        other = copy.copy(self)
        other._live, other._drafted = [t.clone() for t in self._live], [t.clone() for t in self._drafted]
        other.fenced = []
        return other

    def as_kv(self, tensor: Tensor) -> Tensor:
        """A physical state tensor with its last two axes in the order K, V."""
        return tensor.transpose(-1, -2) if self.layout == "VK" else tensor
