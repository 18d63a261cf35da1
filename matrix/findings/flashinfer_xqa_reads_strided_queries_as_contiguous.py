"""flashinfer-python 0.6.13: ``trtllm_batch_decode_with_kv_cache`` on SM 9.0 (XQA) ignores the strides of its queries. Seen on an H200,
torch 2.11, CUDA 13.

``xqa_wrapper.cu`` hands ``q.data_ptr()`` to the kernel and reads strides of the cache only, and nothing asks whether ``q`` is contiguous. A
query that is a view into a fused QKV projection is read as if its rows followed one another: from the second request on, heads come from
another token's queries, keys or values. Needs torch and the package, and a GPU of SM 9.0.
"""

from __future__ import annotations

import sys

import torch

LENGTHS, HEADS, KV_HEADS, DIM, PAGE, PAGES = (6, 18, 65), 4, 2, 128, 16, 5


def reproduce(device: str = "cuda") -> dict[str, float]:
    """Relative error of the output against the right one and against that of the queries read as if contiguous."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    generator = torch.Generator().manual_seed(0)
    requests = len(LENGTHS)
    keys, values = (torch.randn(requests * PAGES, KV_HEADS, PAGE, DIM, generator=generator).bfloat16() for _ in range(2))
    fused = torch.randn(requests, HEADS + 2 * KV_HEADS, DIM, generator=generator).bfloat16().to(device)
    query = fused[:, :HEADS]
    table = torch.arange(requests * PAGES, dtype=torch.int32, device=device).view(requests, PAGES)
    out = torch.empty(requests, HEADS, DIM, dtype=torch.bfloat16, device=device)
    trtllm_batch_decode_with_kv_cache(
        query, (keys.to(device), values.to(device)), torch.zeros(128 << 20, dtype=torch.uint8, device=device), table,
        torch.tensor(LENGTHS, dtype=torch.int32, device=device), max(LENGTHS),
        bmm1_scale=DIM**-0.5, bmm2_scale=1.0, out=out, kv_layout="HND", q_len_per_req=1,
    )  # fmt: skip
    misread = fused.cpu().flatten()[: requests * HEADS * DIM].view(requests, HEADS, DIM)
    return {
        "right": error(out.cpu(), attention(query.cpu(), keys, values)),
        "read as contiguous": error(out.cpu(), attention(misread, keys, values)),
    }


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """float64 ``[R, Hq, D]``."""
    outs = []
    for request, length in enumerate(LENGTHS):
        own = slice(request * PAGES, (request + 1) * PAGES)
        key, value = (
            pool[own].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(HEADS // KV_HEADS, dim=1).double() for pool in (keys, values)
        )
        weight = (torch.einsum("hd,khd->hk", query[request].double(), key) * DIM**-0.5).softmax(dim=-1)
        outs.append(torch.einsum("hk,khd->hd", weight, value))
    return torch.stack(outs)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def main(device: str = "cuda") -> dict[str, float]:
    errors = reproduce(device)
    print(f"error against the right output: {errors['right']:.3g}; with the queries read as contiguous: {errors['read as contiguous']:.3g}")
    return errors


if __name__ == "__main__":
    found = main()
    sys.exit(None if found["right"] > 0.3 and found["read as contiguous"] < 5e-3 else "not reproduced")
