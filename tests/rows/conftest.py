"""The rows' tests run where the machine can: on its GPU, else on the CPU (Triton kernels in the interpreter)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
