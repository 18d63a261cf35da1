"""Dense attention over paged lists, as FlashInfer's wrappers and XQA take them: what the strict stand-in computes with.

It reads the lists where they lie, with operators that a graph can capture.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def slopes(heads: int) -> Tensor:
    """float32 ``[heads]``: ALiBi's slopes as the package's ``get_alibi_slopes`` gives them."""
    lower = 2 ** math.floor(math.log2(heads))
    found = (2.0 ** (-8.0 / lower)) ** torch.arange(1, lower + 1)
    rest = (2.0 ** (-4.0 / lower)) ** torch.arange(1, 1 + 2 * (heads - lower), 2)
    return torch.cat([found, rest]).float()


def attention(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    layout: str,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    *,
    causal: bool = False,
    window_left: int = -1,
    soft_cap: float = 0.0,
    alibi: bool = False,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    limit: Tensor | None = None,
    infinity: float | None = None,
    tile: int = 0,
) -> tuple[Tensor, Tensor]:
    """Output as ``q`` and LSE to base 2, from what the buffers hold when it runs; ``limit`` int32 ``[R]`` cuts the keys of a request.

    ``infinity``: scores are below minus it in vain, before the scale; of a ``tile`` of keys the masked ones then take the weight.
    """
    keys, values = (pool.transpose(1, 2) if layout == "HND" else pool for pool in cache)
    page, requests = keys.shape[1], len(last_page_len)
    entry = torch.arange(len(kv_indices), dtype=torch.int32)
    owner = (torch.searchsorted(kv_indptr, entry, right=True) - 1).clamp(0, requests - 1)
    used = entry < kv_indptr[-1]
    counts = kv_indptr.diff()
    kv_lens = torch.where(counts > 0, (counts - 1) * page + last_page_len, 0)
    position = ((entry - kv_indptr[owner])[:, None] * page + torch.arange(page)).flatten()
    owner = owner.repeat_interleave(page, output_size=len(kv_indices) * page)
    live = used.repeat_interleave(page, output_size=len(owner)) & (position < (kv_lens if limit is None else limit)[owner])
    pages = torch.where(used, kv_indices, 0)
    k, v = (pool[pages].flatten(0, 1).float().masked_fill(~live[:, None, None], 0.0) for pool in (keys, values))
    token = torch.arange(len(q), dtype=torch.int32)
    request = (torch.searchsorted(qo_indptr, token, right=True) - 1).clamp(0, requests - 1)
    own = token - qo_indptr[request]
    back = (kv_lens[request] - qo_indptr.diff()[request] + own)[:, None]  # the query's own position
    seen = live & (owner[None, :] == request[:, None])
    if mask is not None:
        assert mask_indptr is not None
        bit = own[:, None].long() * kv_lens[request][:, None] + position
        byte = (mask_indptr[request][:, None] + bit // 8).clamp(0, len(mask) - 1)
        seen = seen & ((mask[byte].int() >> (bit % 8).int()) % 2 == 1)
    elif causal:
        seen = seen & (position <= back)
    if window_left >= 0:
        seen = seen & (position + window_left >= back)
    group = q.shape[1] // k.shape[1]
    score = torch.einsum("nhd,khd->nhk", q.float(), k.repeat_interleave(group, dim=1)) * scale
    if soft_cap > 0:
        score = soft_cap * torch.tanh(score / soft_cap)
    if alibi:
        score = score + slopes(q.shape[1])[None, :, None] * (position[None, :] - own[:, None])[:, None, :]
    score = score.masked_fill(~seen[:, None, :], float("-inf"))
    if infinity is not None and sinks is None:
        lost = (score.amax(dim=-1) < -infinity * scale)[..., None]
        later = live & (owner[None, :] == request[:, None]) & ~seen
        share = later.float() / (-(-kv_lens // max(tile, 1)) * tile - kv_lens)[request][:, None].add(later.sum(-1, keepdim=True)).clamp(
            min=1
        )
        drawn = torch.einsum("nk,khd->nhd", share * (tile > 0), v.repeat_interleave(group, dim=1))
        score = torch.where(lost, torch.where(seen[:, None, :], -1.0, float("-inf")), score)
    if sinks is not None:
        score = torch.cat([score, sinks[None, :, None].expand(*score.shape[:2], 1)], dim=-1)
    lse = torch.logsumexp(score, dim=-1)
    weight = torch.exp(score - torch.where(lse.isinf(), 0.0, lse)[..., None])[..., : len(live)]
    out = torch.einsum("nhk,khd->nhd", weight, v.repeat_interleave(group, dim=1))
    if infinity is not None and sinks is None:
        out, lse = torch.where(lost, drawn, out), torch.where(lost[..., 0], -infinity, lse)
    return out.to(q.dtype), lse / math.log(2.0)


def by_lanes(q: Tensor, cache: tuple[Tensor, Tensor], *lists: Any, part: int = 128, **how: Any) -> tuple[Tensor, Tensor]:
    """:func:`attention` whose scores are sums over ``part`` dims, counted on over the query heads of a key head, each for its own dims of the
    output. Not modelled: groups whose parts hold two keys' products, and whose denominator a part is divided by."""
    heads, dim = q.shape[1:]
    group = heads // cache[0].shape[1 if lists[0] == "HND" else 2]
    flat = q.reshape(len(q), -1, group * dim)
    out = torch.zeros_like(flat)
    for start in range(0, group * dim, part):
        mine = slice(start, start + part)
        asked = torch.zeros_like(flat)
        asked[..., mine] = flat[..., mine]
        summed = asked.view(len(q), -1, group, dim).sum(dim=2, keepdim=True).expand(-1, -1, group, -1).reshape(q.shape)
        found, lse = attention(summed, cache, *lists, **how)
        out[..., mine] = found.reshape(flat.shape)[..., mine]
    return out.view(q.shape), lse
