"""flashinfer-python 0.6.13: attention on tensor cores is wrong where every score is below -50,000. Seen on an H200, torch 2.11, CUDA 13.

``math.cuh`` says ``inf = 5e4``, and the kernels compare it with scores before the softmax scale, so that at head dim 128 a query and its keys
of about -4,420 in the softmax are enough. fa2 (``prefill.cuh``) starts its running maximum there: no score moves it, every weight is 0, and the
output is zero. fa3 (``hopper/attention_updater.cuh``) masks with it: masked keys, later ones and those that fill the tile, then have the
largest score and share all the weight, so a token's output is the mean of the values it must not see. Needs torch and the package, and a GPU.
"""

from __future__ import annotations

import sys

import torch

PREFIX, NEW, HEADS, KV_HEADS, DIM, PAGE, TILE = 20, 8, 4, 2, 128, 16, 96


def reproduce(device: str = "cuda") -> dict[str, float]:
    """Relative errors of fa3's output against the right one and against the mean of what is masked, and the size of fa2's output."""
    generator = torch.Generator().manual_seed(0)
    total = PREFIX + NEW
    pages = -(-total // PAGE)
    lift = 400 * torch.nn.functional.normalize(torch.ones(DIM), dim=0)  # q . k is about -160,000
    keys, values = (torch.randn(pages * PAGE, KV_HEADS, DIM, generator=generator) for _ in range(2))
    query = (torch.randn(NEW, HEADS, DIM, generator=generator) - lift).bfloat16()
    pools = (keys + lift).bfloat16(), values.bfloat16()
    key, value = (pool[:total].repeat_interleave(HEADS // KV_HEADS, dim=1).double() for pool in pools)
    hidden = torch.arange(total)[None, :] > torch.arange(NEW)[:, None] + PREFIX
    score = torch.einsum("nhd,khd->nhk", query.double(), key) * DIM**-0.5
    right = torch.einsum("nhk,khd->nhd", score.masked_fill(hidden[:, None, :], float("-inf")).softmax(dim=-1), value)
    columns = hidden.sum(dim=-1) + TILE - total
    mean = torch.einsum("nk,khd->nhd", hidden.double(), value) / columns[:, None, None]
    fa2, fa3 = (attend(backend, query, pools, device) for backend in ("fa2", "fa3"))
    return {"mean of what is masked": error(fa3, mean), "right": error(fa3, right), "fa2": float(fa2.norm() / right.norm())}


def attend(backend: str, query: torch.Tensor, pools: tuple[torch.Tensor, ...], device: str) -> torch.Tensor:
    """float64 output of the package's kernels."""
    import flashinfer

    total = PREFIX + NEW
    pages = -(-total // PAGE)
    space = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=backend)
    wrapper.plan(
        ints(device, 0, NEW), ints(device, 0, pages), ints(device, *range(pages)), ints(device, total - (pages - 1) * PAGE),
        HEADS, KV_HEADS, DIM, PAGE, causal=True,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, sm_scale=DIM**-0.5,
    )  # fmt: skip
    given = query.to(device)
    cache = tuple(pool.view(pages, PAGE, KV_HEADS, DIM).to(device) for pool in pools)
    return wrapper.run(given, cache, out=torch.empty_like(given)).cpu().double()


def ints(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def main(device: str = "cuda") -> dict[str, float]:
    errors = reproduce(device)
    print(f"fa2: size of the output, of the right one's: {errors['fa2']:.3g}")
    print(f"fa3: error {errors['right']:.3g}; against the mean of what is masked: {errors['mean of what is masked']:.3g}")
    return errors


if __name__ == "__main__":
    found = main()
    sys.exit(None if found["right"] > 0.3 and found["mean of what is masked"] < 5e-3 and found["fa2"] == 0 else "not reproduced")
