"""Strict stand-ins for ``fused_recurrent_simple_gla`` and ``chunk_simple_gla`` of ``fla.ops.simple_gla`` where the package cannot be imported:
their documented arguments, types and shapes are insisted on, and the recurrence is computed densely in float32."""

from __future__ import annotations

from itertools import pairwise

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
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """``q``, ``k``, ``v`` ``[1, T, H, D]``, ``g_gamma`` ``[H]`` log decay, ``initial_state`` ``[N, H, K, V]`` (``state_v_first``: ``[N, H, V, K]``),
    ``cu_seqlens`` int64 ``[N + 1]``.

    Written to be captured by the tape: each request's tokens are picked by comparison, nothing is read on the host.
    """
    assert not reverse and not kwargs
    g_gamma, initial_state, cu_seqlens = _checked(q, k, v, g, g_gamma, initial_state, cu_seqlens)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    state, decay = initial_state.mT if state_v_first else initial_state, torch.exp(g_gamma)[None, :, None, None]
    out = torch.zeros_like(q, dtype=torch.float32)
    tokens = torch.arange(q.shape[1], device=q.device)
    for token in range(q.shape[1]):
        mine = ((cu_seqlens[:-1] <= tokens[token]) & (tokens[token] < cu_seqlens[1:]))[:, None, None, None]
        update = k[0, token].float()[:, :, None] * v[0, token].float()[:, None, :]
        state = torch.where(mine, state * decay + update[None], state)
        read = torch.einsum("hk,nhkv->nhv", q[0, token].float(), state) * scale
        out[0, token] = torch.where(mine[..., 0], read, 0.0).sum(dim=0)
    return out.to(q.dtype), (state.mT.contiguous() if state_v_first else state) if output_final_state else None


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Arguments as above. In the package's order and roundings: 64 tokens at a time, the operands of every product in the input dtype; lengths
    are read on the host."""
    assert not kwargs
    g_gamma, initial_state, cu_seqlens = _checked(q, k, v, g, g_gamma, initial_state, cu_seqlens)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out, finals = torch.zeros_like(q), []
    for request, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        state = initial_state[request].mT if state_v_first else initial_state[request]
        for begin in range(start, stop, 64):
            at = slice(begin, min(begin + 64, stop))
            queries, keys, values = (tensor[0, at].transpose(0, 1) for tensor in (q, k, v))
            after = torch.arange(1, queries.shape[1] + 1, device=q.device)
            decay = torch.exp(g_gamma[:, None] * after)[..., None]
            left = torch.exp(g_gamma[:, None] * (after[-1] - after))[..., None]
            gap = torch.exp(g_gamma[:, None, None] * (after[:, None] - after[None, :]).clamp(min=0))
            weight = (queries.float() @ keys.float().mT * gap).tril().to(q.dtype)
            read = queries.float() @ state.to(q.dtype).float() * decay + weight.float() @ values.float()
            out[0, at] = (read * scale).transpose(0, 1).to(q.dtype)
            state = state * decay[:, -1:] + keys.float().mT @ (values.float() * left).to(q.dtype).float()
        finals.append(state.mT if state_v_first else state)
    return out, torch.stack(finals) if output_final_state else None


def _checked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_gamma: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The log decays, the states in float32 and the starts."""
    assert q.dim() == 4 and q.shape[0] == 1, "with cu_seqlens the batch is 1"
    assert q.shape == k.shape == v.shape
    assert q.dtype == k.dtype == v.dtype
    assert g is None and g_gamma is not None and g_gamma.shape == (q.shape[2],) and g_gamma.dtype is torch.float32
    assert cu_seqlens is not None and cu_seqlens.dtype is torch.int64 and cu_seqlens.is_contiguous()
    assert initial_state is not None and initial_state.shape == (len(cu_seqlens) - 1, q.shape[2], q.shape[3], q.shape[3])
    assert initial_state.is_contiguous()
    return g_gamma, initial_state.float(), cu_seqlens
