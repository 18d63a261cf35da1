"""Decayed-state attention by matrix products over chunks, whose operands are held in the input dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CHUNK_TOKENS = 64


def chunk_products(
    cut: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, initial: Tensor, slopes: Tensor, new_lens: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """``out`` ``[T, H, V]`` in the input dtype and ``final`` ``[R, H, K, V]`` float32; arguments as in
    :func:`attnmatrix.harness.decay_rounding.chunked_decay`. ``cut`` is what a product reads of a float32 operand.

    Token i of a chunk of n reads the state before the chunk times ``exp(-slope * (i + 1))``; the state takes values times
    ``exp(-slope * (n - 1 - i))``. The state that is read, the decayed scores and the decayed values are rounded; the running state is float32.
    """

    def held(tensor: Tensor) -> Tensor:
        return cut(tensor.to(q.dtype).float())

    rate = slopes.float().view(-1, 1, 1)
    out, finals, start = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device), [], 0
    for request, new in enumerate(new_lens):
        state = initial[request].float()
        for begin in range(start, start + new, CHUNK_TOKENS):
            at = slice(begin, min(begin + CHUNK_TOKENS, start + new))
            query, key, value = (tensor[at].transpose(0, 1).float() for tensor in (q, k, v))
            token = torch.arange(query.shape[1], device=q.device)
            gap = token[:, None] - token[None, :]
            score = cut(query) @ cut(key).mT * torch.exp(-rate * gap.clamp(min=0))
            read = cut(query) @ held(state) * torch.exp(-rate * (token[:, None] + 1))
            out[at] = ((read + held(score.tril()) @ held(value)) * scale).transpose(0, 1).to(q.dtype)
            left = torch.exp(-rate * (len(token) - 1 - token[:, None]))
            state = state * torch.exp(-rate * len(token)) + cut(key).mT @ held(value * left)
        finals.append(state)
        start += new
    return out, torch.stack(finals)
