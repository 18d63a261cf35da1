"""A two-layer model function: projection, norm and residual before, between and after its attention calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind
from attnmatrix.harness.draws import HIDDEN, NUM_LAYERS, LayerInputs
from attnmatrix.harness.world import World

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, q, k, v) -> out``: one attention call."""

MIX = 0.125  # share of the hidden stream in q, k and v: enough to notice, little enough to keep the planned inputs' shape


class TwoLayerModel(torch.nn.Module):
    """``q_l = planned q_l + MIX * projection(norm(hidden_l))``, likewise k and v; the attention output is projected back onto
    the residual stream. Layer 1's inputs therefore depend on layer 0's output, and a piece that is frozen or skipped shows.

    Weights ``[HIDDEN, (Hq + 2 Hkv) * D]`` and ``[Hq * D, HIDDEN]`` in the case's dtype, drawn from the case's content.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        heads = world.case.heads
        self.heads, self.strided, self.linear = heads, world.case.strided, world.case.kind is not AttentionKind.SOFTMAX
        generator = torch.Generator().manual_seed(world.case.data_seed ^ 0x30DE1)
        width = (heads.q + 2 * heads.kv) * heads.dim
        for layer in range(NUM_LAYERS):
            inward = torch.randn(HIDDEN, width, generator=generator) * MIX / HIDDEN**0.5
            outward = torch.randn(heads.q * heads.dim, HIDDEN, generator=generator) / (heads.q * heads.dim) ** 0.5
            self.register_buffer(f"inward{layer}", inward.to(world.dtype).to(world.device))
            self.register_buffer(f"outward{layer}", outward.to(world.dtype).to(world.device))

    def before(self, layer: int, hidden: Tensor, planned: LayerInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of one layer; views of one fused buffer when the case is ``strided``. Kinds with as many keys as queries
        get three strides: there keys lie in a buffer with the values, which are contiguous once more."""
        heads = self.heads
        mixed = rms_norm(hidden) @ getattr(self, f"inward{layer}")
        parts = (planned.q, planned.k, planned.v)
        q_end, k_end = heads.q * heads.dim, (heads.q + heads.kv) * heads.dim
        if self.strided:
            mixed = mixed + torch.cat([part.flatten(1) for part in parts], dim=-1)
        pieces = mixed[:, :q_end], mixed[:, q_end:k_end], mixed[:, k_end:]
        if self.strided and self.linear:
            pieces = pieces[0], torch.cat(pieces[1:], dim=-1)[:, : k_end - q_end], pieces[2].contiguous()
        q, k, v = (piece.unflatten(-1, (-1, heads.dim)) for piece in pieces)
        return (q, k, v) if self.strided else (parts[0] + q, parts[1] + k, parts[2] + v)

    def after(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """The residual stream after one layer ``[T, HIDDEN]``."""
        return hidden + attended.flatten(1) @ getattr(self, f"outward{layer}")

    def forward(self, hidden: Tensor, planned: Sequence[LayerInputs], attend: Attend) -> Tensor:
        for layer in range(NUM_LAYERS):
            q, k, v = self.before(layer, hidden, planned[layer])
            hidden = self.after(layer, hidden, attend(layer, q, k, v))
        return rms_norm(hidden)


def rms_norm(hidden: Tensor) -> Tensor:
    """RMS norm over the last axis, computed in float32."""
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-6)).to(hidden.dtype)
