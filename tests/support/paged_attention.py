"""Dense paged attention in torch operators that a tape can record: what stand-ins for packages compute."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lens: Tensor,
    table: Tensor,
    scale: float,
    keys_before: int | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """``q`` ``[T, Hq, D]`` over pools ``[pages, page, Hkv, D]``: ``[T, Hq, D]`` in q's dtype, computed in float32.

    ``starts`` int32 ``[R + 1]`` of the queries, ``lens`` int32 ``[R]`` of the keys, ``table`` int32 ``[R, pages]``; the mask is aligned
    bottom-right, ``keys_before`` the query's own are seen.
    """
    tokens = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    request = (torch.searchsorted(starts.contiguous(), tokens, right=True) - 1).clamp(0, len(lens) - 1)
    position = tokens - starts[request] + lens[request] - starts.diff()[request]
    index = torch.arange(table.shape[1] * keys.shape[1], dtype=torch.int32, device=q.device)
    distance = index[None, :] - position[:, None]  # [T, L]
    seen = (distance <= 0) & (index[None, :] < lens[request][:, None])
    if keys_before is not None:
        seen = seen & (distance >= -keys_before)
    owns = torch.arange(len(lens), device=q.device)[:, None] == request[None, :]
    alive = (owns.float() @ seen.float()) > 0  # [R, L]
    gathered = [pool[table.long()].flatten(1, 2).float().masked_fill(~alive[..., None, None], 0.0) for pool in (keys, values)]
    k, v = (pool.repeat_interleave(q.shape[1] // keys.shape[2], dim=2)[request] for pool in gathered)  # [T, L, Hq, D]
    score = torch.einsum("thd,tlhd->thl", q.float(), k) * scale
    if soft_cap:
        score = soft_cap * torch.tanh(score / soft_cap)
    if slopes is not None:
        score = score - slopes[None, :, None] * distance.abs()[:, None, :]
    score = score.masked_fill(~seen[:, None, :], float("-inf"))
    if sinks is not None:
        score = torch.cat([score, sinks.float()[None, :, None].expand(*score.shape[:2], 1)], dim=-1)
    weight = torch.softmax(score, dim=-1)[..., : v.shape[1]].nan_to_num(0.0)
    return torch.einsum("thl,tlhd->thd", weight, v).to(q.dtype)
