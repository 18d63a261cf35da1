"""flashinfer-python 0.6.13: ``backend="fa3"`` takes ``pos_encoding_mode="ALIBI"`` and adds no bias. Seen on an H200, torch 2.11, CUDA 13.

The kernels for SM 9.0 (``attention/hopper``) have no ALiBi; ``plan`` and ``run`` accept the mode all the same, and the slopes are handed over
to nobody. ``backend="auto"`` takes fa2 for it and is right. Needs torch and the package, and a GPU of SM 9.0.
"""

from __future__ import annotations

import sys

import torch

PREFIX, NEW, HEADS, KV_HEADS, DIM, PAGE = 33, 7, 4, 2, 128, 16


def reproduce(device: str = "cuda") -> dict[str, float]:
    """Relative error of the output against attention with ALiBi and without."""
    import flashinfer

    generator = torch.Generator().manual_seed(0)
    total = PREFIX + NEW
    pages = -(-total // PAGE)
    keys, values = (torch.randn(pages * PAGE, KV_HEADS, DIM, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(NEW, HEADS, DIM, generator=generator).bfloat16()
    pools = tuple(pool.view(pages, PAGE, KV_HEADS, DIM).to(device) for pool in (keys, values))
    space = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa3")
    wrapper.plan(
        ints(device, 0, NEW), ints(device, 0, pages), ints(device, *range(pages)), ints(device, total - (pages - 1) * PAGE),
        HEADS, KV_HEADS, DIM, PAGE, causal=True, pos_encoding_mode="ALIBI",
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, sm_scale=DIM**-0.5,
    )  # fmt: skip
    given = query.to(device)
    out = wrapper.run(given, pools, out=torch.empty_like(given)).cpu()
    slopes = 2.0 ** (-8.0 / HEADS * torch.arange(1, HEADS + 1, dtype=torch.float64))
    key, value = (pool[:total].repeat_interleave(HEADS // KV_HEADS, dim=1).double() for pool in (keys, values))
    distance = torch.arange(total)[None, :] - (torch.arange(NEW)[:, None] + PREFIX)
    plain = torch.einsum("nhd,khd->nhk", query.double(), key) * DIM**-0.5
    hidden = (distance > 0)[:, None, :]

    def attention(score: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nhk,khd->nhd", score.masked_fill(hidden, float("-inf")).softmax(dim=-1), value)

    return {
        "right": error(out, attention(plain + slopes[:, None] * distance[:, None, :])),
        "no bias": error(out, attention(plain)),
    }


def ints(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def main(device: str = "cuda") -> dict[str, float]:
    errors = reproduce(device)
    print(f"error against attention with ALiBi: {errors['right']:.3g}; without: {errors['no bias']:.3g}")
    return errors


if __name__ == "__main__":
    found = main()
    sys.exit(None if found["right"] > 0.3 and found["no bias"] < 5e-3 else "not reproduced")
