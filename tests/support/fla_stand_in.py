"""A strict stand-in for ``fla.ops.simple_gla.fused_recurrent_simple_gla`` where the package cannot be imported: its documented arguments, types
and shapes are insisted on, and the recurrence is computed densely in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``q``, ``k``, ``v`` ``[1, T, H, D]``, ``g_gamma`` ``[H]`` log decay, ``initial_state`` ``[N, H, K, V]``, ``cu_seqlens`` int64 ``[N + 1]``.

    Written to be captured by the tape: each request's tokens are picked by comparison, nothing is read on the host.
    """
    assert q.dim() == 4 and q.shape[0] == 1, "with cu_seqlens the batch is 1"
    assert q.shape == k.shape == v.shape
    assert q.dtype == k.dtype == v.dtype
    assert g is None and g_gamma is not None and g_gamma.shape == (q.shape[2],) and g_gamma.dtype is torch.float32
    assert cu_seqlens is not None and cu_seqlens.dtype is torch.int64 and cu_seqlens.is_contiguous()
    requests, dim = len(cu_seqlens) - 1, q.shape[3]
    assert initial_state is not None and initial_state.shape == (requests, q.shape[2], dim, dim)
    assert not reverse and not state_v_first
    scale = dim**-0.5 if scale is None else scale
    state, decay = initial_state.float(), torch.exp(g_gamma)[None, :, None, None]
    out = torch.zeros_like(q, dtype=torch.float32)
    tokens = torch.arange(q.shape[1], device=q.device)
    for token in range(q.shape[1]):
        mine = ((cu_seqlens[:-1] <= tokens[token]) & (tokens[token] < cu_seqlens[1:]))[:, None, None, None]
        update = k[0, token].float()[:, :, None] * v[0, token].float()[:, None, :]
        state = torch.where(mine, state * decay + update[None], state)
        read = torch.einsum("hk,nhkv->nhv", q[0, token].float(), state) * scale
        out[0, token] = torch.where(mine[..., 0], read, 0.0).sum(dim=0)
    return out.to(q.dtype), state if output_final_state else None
