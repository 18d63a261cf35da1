"""flashinfer-python 0.6.13: ``trtllm_batch_decode_with_kv_cache`` on SM 9.0 (XQA) has no window for several tokens per request. Seen on an
H200, torch 2.11, CUDA 13.

``xqa/mha.cu`` compiled with ``SPEC_DEC`` masks with the draft tokens' mask only: the branch that masks the keys before a window is left out by
the preprocessor, and of ``window_left`` only the number of leading tiles to skip remains. Keys up to a tile older than the window are attended;
nothing is refused. Needs torch and the package, and a GPU of SM 9.0.
"""

from __future__ import annotations

import sys

import torch

PREFIX, DRAFTS, WINDOW_LEFT, HEADS, KV_HEADS, DIM, PAGE = 24, 4, 7, 4, 2, 128, 16


def reproduce(device: str = "cuda") -> dict[str, float]:
    """Relative error of the output against attention with the window and without."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    generator = torch.Generator().manual_seed(0)
    total = PREFIX + DRAFTS
    pages = -(-total // PAGE)
    keys, values = (torch.randn(pages, KV_HEADS, PAGE, DIM, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(DRAFTS, HEADS, DIM, generator=generator).bfloat16()
    chain = torch.tensor([[[(2 << token) - 1] for token in range(DRAFTS)]], dtype=torch.int32, device=device)
    out = torch.empty(DRAFTS, HEADS, DIM, dtype=torch.bfloat16, device=device)
    trtllm_batch_decode_with_kv_cache(
        query.to(device), (keys.to(device), values.to(device)), torch.zeros(128 << 20, dtype=torch.uint8, device=device),
        torch.arange(pages, dtype=torch.int32, device=device)[None], torch.tensor([total], dtype=torch.int32, device=device), total,
        bmm1_scale=DIM**-0.5, bmm2_scale=1.0, window_left=WINDOW_LEFT, out=out, kv_layout="HND", q_len_per_req=DRAFTS,
        mask=chain.view(torch.uint16),
    )  # fmt: skip
    distance = torch.arange(total)[None, :] - (torch.arange(DRAFTS)[:, None] + PREFIX)
    return {
        "right": error(out.cpu(), attention(query, keys, values, (distance <= 0) & (distance >= -WINDOW_LEFT))),
        "no window": error(out.cpu(), attention(query, keys, values, distance <= 0)),
    }


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """float64 ``[T, Hq, D]``; ``seen`` bool ``[T, keys]``."""
    key, value = (
        pool.transpose(1, 2).flatten(0, 1)[: seen.shape[1]].repeat_interleave(HEADS // KV_HEADS, dim=1).double() for pool in (keys, values)
    )
    score = torch.einsum("nhd,khd->nhk", query.double(), key) * DIM**-0.5
    return torch.einsum("nhk,khd->nhd", score.masked_fill(~seen[:, None, :], float("-inf")).softmax(dim=-1), value)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def main(device: str = "cuda") -> dict[str, float]:
    errors = reproduce(device)
    print(f"error against attention with the window: {errors['right']:.3g}; without: {errors['no window']:.3g}")
    return errors


if __name__ == "__main__":
    found = main()
    sys.exit(None if found["right"] > 0.3 and found["no window"] < 5e-3 else "not reproduced")
