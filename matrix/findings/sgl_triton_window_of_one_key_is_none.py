"""sglang 0.5.23: ``extend_attention_fwd`` takes a window of the query's own key, ``sliding_window_size=0``, for none.

-1 means no window, and n that a query sees n keys before its own. The kernel asks ``SLIDING_WINDOW_SIZE > 0`` in
``sglang/kernels/ops/attention/extend_attention.py``, so at 0 every earlier new key is seen, and nothing is refused. Needs torch, triton and
the package's files; runs in Triton's interpreter without a GPU.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from types import ModuleType

import torch

NEW, HEADS, DIM = 5, 2, 64
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
    """Relative error of five tokens without a prefix against attention to their own key and to all earlier ones."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    kernels = load_kernels()
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(NEW, HEADS, DIM, generator=generator) for _ in range(3))
    out = torch.empty(NEW, HEADS, DIM, device=device)
    pool_k, pool_v = keys.to(device), values.to(device)

    def starts(*at: int) -> torch.Tensor:
        return torch.tensor(at, dtype=torch.int64, device=device)

    kernels.extend_attention_fwd(
        query.to(device), pool_k, pool_v, out, pool_k, pool_v, qo_indptr=starts(0, NEW), kv_indptr=starts(0, 0), kv_indices=starts(0),
        custom_mask=None, is_causal=True, mask_indptr=None, max_len_extend=NEW, k_scale=1.0, v_scale=1.0, sm_scale=DIM**-0.5,
        sliding_window_size=0, window_kv_offsets=starts(0),
    )  # fmt: skip
    score = torch.einsum("nhd,khd->hnk", query.double(), keys.double()) * DIM**-0.5
    earlier = score.masked_fill(~torch.ones(NEW, NEW, dtype=torch.bool).tril(), float("-inf")).softmax(dim=-1)
    return {
        "every earlier key": error(out.cpu(), torch.einsum("hnk,khd->nhd", earlier, values.double())),
        "the own key": error(out.cpu(), values.double()),
    }


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def main() -> dict[str, float]:
    errors = reproduce()
    print(f"error against attention to the own key: {errors['the own key']:.3g}; to every earlier key: {errors['every earlier key']:.3g}")
    return errors


if __name__ == "__main__":
    found = main()
    sys.exit(None if found["the own key"] > 0.3 and found["every earlier key"] < 5e-3 else "not reproduced")
