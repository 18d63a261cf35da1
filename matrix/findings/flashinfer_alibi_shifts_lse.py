"""flashinfer-python 0.6.13: with ALiBi and a cached prefix the LSE is off by slope times prefix length. Seen on an H200, torch 2.11, CUDA 13.

The bias of ``attention/variants.cuh`` is ``slope * (kv_idx - qo_idx)``, and ``qo_idx`` counts the new tokens from 0, without the prefix. All
scores of a row are off by the same number, which the softmax divides out: the output is right. The LSE keeps it, so parts of a prefix that
are attended apart and merged by their LSE (cascade attention, split prefills) get wrong weights. Needs torch and the package, and a GPU.
"""

from __future__ import annotations

import math
import sys

import torch

PREFIX, NEW, HEADS, KV_HEADS, DIM, PAGE = 33, 7, 4, 2, 128, 16


def reproduce(device: str = "cuda") -> dict[str, float]:
    """Relative errors of the output, and of the LSE against the right one and against one that is slope times prefix larger."""
    import flashinfer

    generator = torch.Generator().manual_seed(0)
    total = PREFIX + NEW
    pages = -(-total // PAGE)
    keys, values = (torch.randn(pages * PAGE, KV_HEADS, DIM, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(NEW, HEADS, DIM, generator=generator).bfloat16()
    pools = tuple(pool.view(pages, PAGE, KV_HEADS, DIM).to(device) for pool in (keys, values))
    space = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa2")
    wrapper.plan(
        ints(device, 0, NEW), ints(device, 0, pages), ints(device, *range(pages)), ints(device, total - (pages - 1) * PAGE),
        HEADS, KV_HEADS, DIM, PAGE, causal=True, pos_encoding_mode="ALIBI",
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, sm_scale=DIM**-0.5,
    )  # fmt: skip
    given = query.to(device)
    out, lse = wrapper.run(given, pools, out=torch.empty_like(given), return_lse=True)
    slopes = 2.0 ** (-8.0 / HEADS * torch.arange(1, HEADS + 1, dtype=torch.float64))
    key, value = (pool[:total].repeat_interleave(HEADS // KV_HEADS, dim=1).double() for pool in (keys, values))
    distance = torch.arange(total)[None, :] - (torch.arange(NEW)[:, None] + PREFIX)
    score = torch.einsum("nhd,khd->nhk", query.double(), key) * DIM**-0.5 + slopes[:, None] * distance[:, None, :]
    score = score.masked_fill((distance > 0)[:, None, :], float("-inf"))
    right = score.logsumexp(dim=-1)
    natural = lse.cpu().double() * math.log(2.0)  # the package's is to base 2
    return {
        "output": error(out.cpu(), torch.einsum("nhk,khd->nhd", score.softmax(dim=-1), value)),
        "right": error(natural, right),
        "slope times prefix larger": error(natural, right + slopes * PREFIX),
    }


def ints(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def main(device: str = "cuda") -> dict[str, float]:
    errors = reproduce(device)
    print(f"error of the output: {errors['output']:.3g}")
    print(
        f"error of the LSE: {errors['right']:.3g}; against the right LSE plus slope times prefix: {errors['slope times prefix larger']:.3g}"
    )
    return errors


if __name__ == "__main__":
    found = main()
    sys.exit(None if found["right"] > 0.3 and found["slope times prefix larger"] < 5e-3 else "not reproduced")
