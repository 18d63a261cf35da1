"""Decayed-state attention as a chunked kernel rounds it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmatrix.harness.chunk_products import chunk_products
from attnmatrix.harness.rounding import CHUNK_OPERANDS, PARTIAL_SUMS, TF32_PRODUCTS, WIDE_PARTIAL_SUMS, check_known, exact, tf32

CHUNK = 32  # tokens that Lightning's prefill kernels take at a time
STATE_STEPS = frozenset({TF32_PRODUCTS, CHUNK_OPERANDS})  # the others reach the output alone
KEY_SPLITS = {PARTIAL_SUMS: 32, WIDE_PARTIAL_SUMS: 128}  # key dims per partial sum


@dataclass(frozen=True)
class ChunkedDecay:
    """``out`` ``[T, H, V]`` in the input dtype and ``final`` ``[R, H, K, V]`` float32."""

    out: Tensor
    final: Tensor


def chunked_decay(
    steps: Collection[str], q: Tensor, k: Tensor, v: Tensor, initial: Tensor, slopes: Tensor, new_lens: Sequence[int], scale: float
) -> ChunkedDecay:
    """Decayed-state attention chunk by chunk with the decays factored into q and k, under the named steps.

    Arguments as in :func:`attnmatrix.references.decayed_state.decayed_state_attention`. Token i of a chunk of n is scaled by
    ``exp(slope * (n - 1 - i))``, its key by the inverse (lightning attention, arXiv 2401.04658, algorithm 1).
    """
    check_known(steps, (PARTIAL_SUMS, WIDE_PARTIAL_SUMS, TF32_PRODUCTS, CHUNK_OPERANDS))
    cut = tf32 if TF32_PRODUCTS in steps else exact
    if CHUNK_OPERANDS in steps:
        return ChunkedDecay(*chunk_products(cut, q, k, v, initial, slopes, new_lens, scale))
    splits = next((q.shape[2] // KEY_SPLITS[step] for step in sorted(steps) if step in KEY_SPLITS), 1)
    rate = slopes.float().view(-1, 1, 1)
    qs, ks = (t.float().unflatten(2, (splits, -1)).permute(2, 1, 0, 3) for t in (q, k))  # [S, H, T, K / S]
    vs = v.float().transpose(0, 1)  # [H, T, V]
    parts = torch.empty(splits, *q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    finals, start = [], 0
    for request, new in enumerate(new_lens):
        state = initial[request].float().unflatten(1, (splits, -1)).transpose(0, 1)  # [S, H, K / S, V]
        for begin in range(start, start + new, CHUNK):
            at = slice(begin, min(begin + CHUNK, start + new))
            count = at.stop - at.start
            left = torch.arange(count - 1, -1, -1, device=q.device)[:, None]
            query, key, value = cut(qs[:, :, at] * torch.exp(rate * left)), cut(ks[:, :, at] * torch.exp(-rate * left)), cut(vs[:, at])
            score = (query @ key.transpose(-1, -2) * scale).tril()
            fade = torch.exp(-rate * count)
            out = query @ cut(state) * fade * scale + cut(score) @ value
            state = state * fade + key.transpose(-1, -2) @ value
            parts[:, at] = out.transpose(1, 2).to(q.dtype)
        finals.append(state.transpose(0, 1).flatten(1, 2))
        start += new
    return ChunkedDecay(parts.float().sum(dim=0).to(q.dtype), torch.stack(finals))
