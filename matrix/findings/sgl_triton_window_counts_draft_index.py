"""sglang 0.5.23: ``extend_attention_fwd`` counts the window of a draft tree's token by its index among the drafts, not by its depth.

One request with 12 cached tokens and a tree of three drafts that are all children of the last cached token, so all three are at
position 12 and a window of 4 keys holds positions 9 to 12 for each. The kernel takes draft i to be at position 12 + i
(``cur_seq_len_prefix + cur_block_m * BLOCK_M + offs_m <= start_n + offs_n + SLIDING_WINDOW_SIZE`` in
``sglang/kernels/ops/attention/extend_attention.py``), so the last draft loses the keys at 9 and 10. Nothing is refused; chains are
right, since there index and depth agree. Needs torch, triton and the package's files; runs in Triton's interpreter without a GPU.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from types import ModuleType

import torch

PREFIX, DRAFTS, WINDOW, HEADS, DIM = 12, 3, 4, 2, 64
FOLDERS = ("sglang", "sglang/kernels", "sglang/kernels/ops", "sglang/kernels/ops/attention", "sglang/srt")


def load_kernels() -> ModuleType:
    """The kernel's file, under empty packages and with a stand-in for ``sglang.srt.utils``, which imports the whole engine."""
    files = importlib.metadata.files("sglang") or []
    kernel = next(file for file in files if file.as_posix() == "sglang/kernels/ops/attention/extend_attention.py")
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "sglang"}
    try:
        for folder in FOLDERS:
            package = sys.modules[folder.replace("/", ".")] = ModuleType(folder.replace("/", "."))
            package.__path__ = [str(kernel.locate()).removesuffix(kernel.as_posix()) + folder]
        utils = sys.modules["sglang.srt.utils"] = ModuleType("sglang.srt.utils")
        for name in ("is_hip", "is_gfx95_supported", "is_gfx1250_supported"):
            setattr(utils, name, lambda: False)
        vars(utils).update(is_cuda=torch.cuda.is_available, get_device_core_count=lambda index=0: 0)
        return importlib.import_module("sglang.kernels.ops.attention.extend_attention")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(before)


def reproduce() -> dict[str, float]:
    """Relative error of the last draft's output against windows counted by depth and by index."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    kernels = load_kernels()
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(PREFIX + DRAFTS, HEADS, DIM, generator=generator) for _ in range(2))
    query = torch.randn(DRAFTS, HEADS, DIM, generator=generator)
    seen = torch.cat([torch.ones(DRAFTS, PREFIX, dtype=torch.bool), torch.eye(DRAFTS, dtype=torch.bool)], dim=1)
    first = PREFIX - (WINDOW - 1)  # the first cached key in the window of position 12
    out = torch.empty(DRAFTS, HEADS, DIM, device=device)
    pool_k, pool_v = keys.to(device), values.to(device)

    def starts(*at: int) -> torch.Tensor:
        return torch.tensor(at, dtype=torch.int64, device=device)

    kernels.extend_attention_fwd(
        query.to(device),
        pool_k[PREFIX:],
        pool_v[PREFIX:],
        out,
        pool_k,
        pool_v,
        qo_indptr=starts(0, DRAFTS),
        kv_indptr=starts(0, WINDOW - 1),
        kv_indices=starts(*range(first, PREFIX)),
        custom_mask=seen.to(device=device, dtype=torch.uint8).flatten(),
        is_causal=True,
        mask_indptr=starts(0, seen.numel()),
        max_len_extend=DRAFTS,
        k_scale=1.0,
        v_scale=1.0,
        sliding_window_size=WINDOW - 1,
        window_kv_offsets=starts(first),
    )
    index = torch.arange(PREFIX + DRAFTS)
    depth = index.clamp(max=PREFIX)  # every draft is at position 12
    errors = {}
    for name, position in (("by index", index), ("by depth", depth)):
        window = position[PREFIX:, None] - position[None, :] < WINDOW
        right = _attention(query, keys, values, seen & window)
        errors[name] = _error(out.cpu()[-1], right[-1])
    return errors


def _attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    score = torch.einsum("nhd,khd->hnk", query.double(), keys.double()) * DIM**-0.5
    return torch.einsum("hnk,khd->nhd", score.masked_fill(~mask, float("-inf")).softmax(dim=-1), values.double())


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def main() -> dict[str, float]:
    errors = reproduce()
    print(f"error of the last draft against windows by depth (right): {errors['by depth']:.3g}")
    print(f"error of the last draft against windows by index:         {errors['by index']:.3g}")
    return errors


if __name__ == "__main__":
    main()
