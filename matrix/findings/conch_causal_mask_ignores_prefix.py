"""conch-triton-kernels 1.3: ``varlen_attention(causal=True)`` aligns its mask top-left, so a cached prefix is misread.

One request with 20 cached and 3 new tokens: new token i is at position 20 + i and should see keys 0 .. 20 + i. The kernel
compares i itself with the key positions (``query_split_group_seq_offsets >= effective_seqlen_k_offsets`` in
``conch/kernels/attention/varlen_attention.py``), so token i sees keys 0 .. i and nothing is refused. A single new token is
right, because the kernel drops the mask for it. Needs torch and the package; runs in Triton's interpreter without a GPU.
"""

from __future__ import annotations

import os

import torch

PREFIX, NEW, HEADS, DIM, PAGE = 20, 3, 2, 64, 16


def reproduce() -> dict[str, float]:
    """Relative error of the kernel's output against the right result and against a mask aligned top-left."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from conch.ops.attention.varlen_attention import varlen_attention

    generator = torch.Generator().manual_seed(0)
    total = PREFIX + NEW
    keys, values = (torch.randn(2 * PAGE, HEADS, DIM, generator=generator) for _ in range(2))
    query = torch.randn(NEW, HEADS, DIM, generator=generator)
    out = varlen_attention(
        query.to(device),
        keys.view(2, PAGE, HEADS, DIM).to(device),
        values.view(2, PAGE, HEADS, DIM).to(device),
        cu_seqlens_q=torch.tensor([0, NEW], dtype=torch.int32, device=device),
        max_seqlen_q=NEW,
        seq_lens=torch.tensor([total], dtype=torch.int32, device=device),
        max_seqlen_k=total,
        block_table=torch.tensor([[0, 1]], dtype=torch.int32, device=device),
        causal=True,
        strict=True,
    ).cpu()
    row, column = torch.arange(NEW)[:, None], torch.arange(total)[None, :]
    return {
        "right": _error(out, _attention(query, keys[:total], values[:total], column <= row + PREFIX)),
        "top-left": _error(out, _attention(query, keys[:total], values[:total], column <= row)),
    }


def _attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    score = torch.einsum("nhd,khd->hnk", query.double(), keys.double()) * DIM**-0.5
    return torch.einsum("hnk,khd->nhd", score.masked_fill(~mask, float("-inf")).softmax(dim=-1), values.double())


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def main() -> dict[str, float]:
    errors = reproduce()
    print(f"error against causal attention over the prefix: {errors['right']:.3g}")
    print(f"error against a mask aligned top-left:          {errors['top-left']:.3g}")
    return errors


if __name__ == "__main__":
    main()
