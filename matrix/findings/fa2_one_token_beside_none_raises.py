"""flash-attn 2.8.3: ``flash_attn_varlen_func`` raises when one request has a single new token and another has none, under GQA.

``mha_varlen_fwd`` (``flash_api.cpp``, ``seqlenq_ngroups_swapped``) takes ``max_seqlen_q == 1`` for one token per request and reshapes the queries
to ``[batch_size, heads_k, group, dim]``; ``cu_seqlens_q`` may say otherwise. Without GQA, with a window or with ALiBi the same batch is computed.
Read in the source. Needs torch and the package, and a GPU.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

HEADS, KV_HEADS, DIM, PAGE, LENGTHS = 4, 2, 64, 256, (6, 9)


def reproduce(device: str = "cuda", package: Any = None) -> dict[str, float]:
    """Relative error of the first request's output, alone and with a second one that has no new token; infinite: it raised."""
    package = package or importlib.import_module("flash_attn.flash_attn_interface")
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, PAGE, KV_HEADS, DIM, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(1, HEADS, DIM, generator=generator).bfloat16()
    key, value = (pool[0, : LENGTHS[0]].repeat_interleave(HEADS // KV_HEADS, dim=1).double() for pool in (keys, values))
    weight = (torch.einsum("hd,khd->hk", query[0].double(), key) * DIM**-0.5).softmax(dim=-1)
    right = torch.einsum("hk,khd->hd", weight, value)
    found = {}
    for name, starts in (("alone", [0, 1]), ("beside a request without tokens", [0, 1, 1])):
        requests = len(starts) - 1
        ends = torch.tensor([0, *LENGTHS[:requests]]).cumsum(0).int()
        table = torch.arange(requests, dtype=torch.int32, device=device)[:, None]
        tables = torch.tensor(starts, dtype=torch.int32, device=device), ends.to(device), 1, max(LENGTHS[:requests])
        try:
            out = package.flash_attn_varlen_func(
                query.to(device), keys.to(device), values.to(device), *tables, softmax_scale=DIM**-0.5, causal=True, block_table=table
            )
            found[name] = float((out[0].cpu().double() - right).norm() / right.norm())
        except RuntimeError as raised:
            print(f"{name}: {str(raised).splitlines()[0]}")
            found[name] = float("inf")
    return found


def main(device: str = "cuda", package: Any = None) -> dict[str, float]:
    errors = reproduce(device, package)
    print(
        f"error alone {errors['alone']:.3g}, beside a request without tokens {errors['beside a request without tokens']:.3g} (inf: raised)"
    )
    return errors


if __name__ == "__main__":
    shown = main()
    sys.exit(None if shown["alone"] < 5e-3 and shown["beside a request without tokens"] > 0.3 else "not reproduced")
