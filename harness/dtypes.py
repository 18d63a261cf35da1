"""Case dtype names as torch dtypes."""

from __future__ import annotations

import torch

TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8e4m3": torch.float8_e4m3fn,
}
