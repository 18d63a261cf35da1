"""conch-triton-kernels 1.3: ``paged_attention`` reads the wrong memory for pages that lie past 2**31 elements in the pool.

One request of 40 tokens whose only page is the pool's last one. ``conch/kernels/attention/paged_attention.py`` computes
``physical_cache_block_number * kv_page_stride`` from an int32 page number and an int32 stride: past 2**31 elements the product wraps and
the kernel reads before the pool. Here the pool is the second half of a buffer twice its size, so that what is read instead is memory that
holds zeros. Needs torch, the package and a GPU with 20 GB of free memory; the interpreter computes with wider integers.
"""

from __future__ import annotations

import torch

HEADS, DIM, PAGE, TOKENS = 8, 128, 256, 40
PAGES = 2**31 // (PAGE * HEADS * DIM) + 2


def reproduce() -> dict[str, float]:
    """Relative error of the kernel's output when the request's page is the last of the pool, and when it is the first."""
    from conch.ops.attention.paged_attention import paged_attention

    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(TOKENS, HEADS, DIM, generator=generator).half() for _ in range(2))
    query = torch.randn(1, HEADS, DIM, generator=generator).half()
    score = torch.einsum("nhd,khd->hnk", query.double(), keys.double()) * DIM**-0.5
    right = torch.einsum("hnk,khd->nhd", score.softmax(dim=-1), values.double())
    pools = [torch.zeros(2 * PAGES, PAGE, HEADS, DIM, dtype=torch.float16, device="cuda")[PAGES:] for _ in range(2)]
    errors = {}
    for name, page in (("first", 0), ("last", PAGES - 1)):
        for pool, given in zip(pools, (keys, values), strict=True):
            pool[page, :TOKENS] = given.cuda()
        table = torch.tensor([[page]], dtype=torch.int32, device="cuda")
        lens = torch.tensor([TOKENS], dtype=torch.int32, device="cuda")
        out = paged_attention(query.cuda(), *pools, table, lens, output=torch.empty_like(query, device="cuda"), scale=DIM**-0.5)
        errors[name] = float((out.cpu().double() - right).norm() / right.norm())
    return errors


def main() -> dict[str, float]:
    errors = reproduce()
    print(f"error with the request's keys in the pool's first page: {errors['first']:.3g}")
    print(f"error with them in its last page, past 2**31 elements:  {errors['last']:.3g}")
    return errors


if __name__ == "__main__":
    main()
