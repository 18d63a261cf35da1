"""flashinfer-python 0.6.13: fa2's kernels compute garbage for head dims 80 and 96, and refuse nothing. Seen on an H200, torch 2.11, CUDA 13.

``attention/prefill.cuh`` moves queries, keys, values and outputs in blocks of 64 dims: ``load_q_global_smem``, ``page_produce_kv`` and
``write_o_reg_gmem`` loop to ``NUM_MMA_D / 4`` fragments of 16 dims, which for 80 (5 fragments) and 96 (6) is one block. The rest of each
row in shared memory is what lay there before, and the rest of each output row is never written. Only where the parts of a split are merged
does ``DISPATCH_HEAD_DIM`` (64, 128, 256, 512) raise ``Unsupported head_dim``, so a wrapper planned for a CUDA graph fails at its first run.
The decode kernel for CUDA cores is wrong too: it adds over 10 or 12 threads as if they were a power of two (``decode.cuh``).
Needs torch and the package, and a GPU.
"""

from __future__ import annotations

import sys

import torch

PREFIX, NEW, HEADS, KV_HEADS, DIM, PAGE, FILL = 20, 18, 4, 2, 80, 16, 7.0


def reproduce(device: str = "cuda") -> dict[str, float]:
    """Relative error of the output, and how far its last 16 columns are from what the output tensor held before the call."""
    import flashinfer

    generator = torch.Generator().manual_seed(0)
    total = PREFIX + NEW
    pages = -(-total // PAGE)
    keys, values = (torch.randn(pages * PAGE, KV_HEADS, DIM, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(NEW, HEADS, DIM, generator=generator).bfloat16()
    pools = tuple(pool.view(pages, PAGE, KV_HEADS, DIM).to(device) for pool in (keys, values))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend="fa2")
    wrapper.plan(
        ints(device, 0, NEW), ints(device, 0, pages), ints(device, *range(pages)), ints(device, total - (pages - 1) * PAGE),
        HEADS, KV_HEADS, DIM, PAGE, causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, sm_scale=DIM**-0.5,
    )  # fmt: skip
    out = torch.full((NEW, HEADS, DIM), FILL, dtype=torch.bfloat16, device=device)
    wrapper.run(query.to(device), pools, out=out)
    score = torch.einsum("nhd,khd->hnk", query.double(), keys[:total].repeat_interleave(HEADS // KV_HEADS, dim=1).double()) * DIM**-0.5
    mask = torch.arange(total)[None, :] <= torch.arange(NEW)[:, None] + PREFIX
    weight = score.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    right = torch.einsum("hnk,khd->nhd", weight, values[:total].repeat_interleave(HEADS // KV_HEADS, dim=1).double())
    return {
        "right": error(out.cpu(), right),
        "columns 64 to 79 as they were": error(out.cpu()[..., 64:], torch.full((NEW, HEADS, DIM - 64), FILL).double()),
    }


def refusal(device: str = "cuda") -> str:
    """What a decode wrapper that was made for a CUDA graph says when it is run."""
    import flashinfer

    fixed = {
        "paged_kv_indptr_buffer": ints(device, 0, 0),
        "paged_kv_indices_buffer": ints(device, 0),
        "paged_kv_last_page_len_buffer": ints(device, 0),
    }
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), "NHD", use_cuda_graph=True, use_tensor_cores=True, backend="fa2", **fixed
    )
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(ints(device, 0, 1), ints(device, 0), ints(device, 5), HEADS, KV_HEADS, DIM, PAGE, sm_scale=DIM**-0.5, **types)
    pools = tuple(torch.zeros(1, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(2))
    query = torch.zeros(1, HEADS, DIM, dtype=torch.bfloat16, device=device)
    try:
        wrapper.run(query, pools, out=torch.empty_like(query))
    except RuntimeError as raised:
        return str(raised)
    return "nothing"


def workspace(device: str) -> torch.Tensor:
    return torch.zeros(128 << 20, dtype=torch.uint8, device=device)


def ints(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative; infinite when anything is not finite."""
    return float(torch.nan_to_num((actual.double() - expected).norm() / expected.norm(), nan=float("inf")))


def main(device: str = "cuda") -> dict[str, float]:
    errors = reproduce(device)
    print(f"head dim {DIM}: error against causal attention {errors['right']:.3g}")
    print(f"output columns 64 to 79 against what the tensor held before the call: {errors['columns 64 to 79 as they were']:.3g}")
    print(f"decode planned for a graph says: {refusal(device)}")
    return errors


if __name__ == "__main__":
    found = main()
    sys.exit(None if found["right"] > 0.3 and found["columns 64 to 79 as they were"] < 5e-3 else "not reproduced")
