"""flashinfer-python 0.6.13: CUDA-core decode of head dim 192 adds up parts of scores. Seen on an H200, torch 2.11, CUDA 13.

``decode.cuh`` gives a head's dims to ``bdx = 192 / 8 = 24`` threads and adds their parts of q * k by exchanges with the threads ``bdx / 2``,
``bdx / 4``, ... away: 12, 6, 3 and 1. That adds 24 parts only if 24 were a power of two; as it is, each aligned 16 threads of the block hold
one sum, of 128 dims, some of them of the next query head. Dims 0 to 127 of the first head are weighted by the scores of these dims alone,
dims 128 to 191 and the next head's 0 to 63 by the sum of both heads' parts, and so on. All threads of a head then write their denominator to
one place, so each part is also off by a factor. Decode on tensor cores is right. Needs torch and the package, and a GPU.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import torch

HEADS, DIM, PAGE, KEYS = 2, 192, 16, 2
PART = 16 * 8
"""Dims over which 16 threads add, counted on from one query head of a key head to the next."""


def reproduce(device: str = "cuda") -> dict[str, float]:
    """Relative errors of the output against attention, and against attention by partial scores, up to one factor a part."""
    generator = torch.Generator().manual_seed(0)
    pools = tuple(torch.randn(1, PAGE, 1, DIM, generator=generator).bfloat16() for _ in range(2))
    query = 3 * torch.randn(1, HEADS, DIM, generator=generator).bfloat16()
    out = decode(query, pools, device)
    keys, values = (pool[0, :KEYS, 0].double() for pool in pools)
    products = query[0].double()[:, None, :] * keys * DIM**-0.5  # [heads, keys, dims]
    right = torch.einsum("hk,kd->hd", products.sum(dim=-1).softmax(dim=-1), values)
    flat, many = products.transpose(1, 2).reshape(HEADS * DIM, KEYS), values.T.repeat(HEADS, 1)  # [heads * dims, keys]
    found = torch.zeros(HEADS * DIM, dtype=torch.float64)
    for start in range(0, HEADS * DIM, PART):
        part = slice(start, start + PART)
        found[part] = many[part] @ flat[part].sum(dim=0).softmax(dim=0)
    ends = sorted({*range(0, HEADS * DIM + 1, PART), *range(0, HEADS * DIM + 1, DIM)})
    for begin, end in pairwise(ends):  # the denominator is another part's: compare directions
        found[begin:end] *= out[begin:end].norm() / found[begin:end].norm()
    return {"sums of 16 threads": error(out, found), "right": error(out, right.flatten())}


def decode(query: torch.Tensor, pools: tuple[torch.Tensor, ...], device: str) -> torch.Tensor:
    """float64 ``[heads * dims]``: the package's output for one request."""
    import flashinfer

    space = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=False, backend="fa2")
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(ints(device, 0, 1), ints(device, 0), ints(device, KEYS), HEADS, 1, DIM, PAGE, sm_scale=DIM**-0.5, **types)
    given = query.to(device)
    out = wrapper.run(given, tuple(pool.to(device) for pool in pools), out=torch.empty_like(given))
    return out.cpu().double().flatten()


def ints(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def main(device: str = "cuda") -> dict[str, float]:
    errors = reproduce(device)
    print(f"head dim {DIM}, {KEYS} keys: error against attention {errors['right']:.3g}")
    print(f"error against weights from the sums of 16 threads, up to a factor a part: {errors['sums of 16 threads']:.3g}")
    return errors


if __name__ == "__main__":
    found = main()
    sys.exit(None if found["right"] > 0.3 and found["sums of 16 threads"] < 5e-3 else "not reproduced")
