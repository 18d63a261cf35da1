"""What a backend is given once: pools, tables, geometry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnmatrix.cases.case import AttentionKind, ForwardMode, Heads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attnmatrix.harness.pools import KVPool, StatePool


@dataclass(frozen=True)
class Context:
    """Everything that outlives a batch.

    ``kv`` is None for linear kinds, ``states`` for softmax. ``windows[layer]`` follows the row's declared convention, None is
    unlimited. ``k_scales[layer]`` and ``v_scales[layer]`` multiply what a quantised cache holds. ``slopes`` ``[layers, H]`` float32 are Lightning's decay rates. ``forward_mode`` and ``tokens_per_request``
    describe what graphs are captured for; ``max_reqs`` bounds the padded batch size, ``max_seq_len`` the KV length.
    """

    kind: AttentionKind
    device: torch.device
    dtype: torch.dtype
    heads: Heads
    scale: float
    num_layers: int
    page_size: int
    req_to_token: Tensor  # on gpu; int32 [rows, max_seq_len]
    forward_mode: ForwardMode
    tokens_per_request: int
    max_reqs: int
    max_seq_len: int
    kv: KVPool | None = None
    states: StatePool | None = None
    windows: tuple[int | None, ...] = ()
    soft_cap: float | None = None
    sinks: Tensor | None = None  # on gpu; float32 [Hq]
    alibi_slopes: Tensor | None = None  # on gpu; float32 [Hq]
    slopes: Tensor | None = None  # on gpu; float32 [layers, H]
    k_scales: tuple[float, ...] = ()  # empty: the cache is not quantised
    v_scales: tuple[float, ...] = ()

    def k_scale(self, layer: int) -> float:
        """What a layer's cached keys are multiplied by, 1 where the cache is not quantised."""
        return self.k_scales[layer] if self.k_scales else 1.0

    def v_scale(self, layer: int) -> float:
        """What a layer's cached values are multiplied by, 1 where the cache is not quantised."""
        return self.v_scales[layer] if self.v_scales else 1.0

    @property
    def pages_per_request(self) -> int:
        """Columns of a page table that holds ``max_seq_len`` tokens."""
        return -(-self.max_seq_len // self.page_size)
