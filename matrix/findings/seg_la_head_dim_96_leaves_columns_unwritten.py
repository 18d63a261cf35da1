"""sglang 0.5.23: with more than two requests and head dim 96, the last 32 columns of output and state are never computed.

``seg_la_fwd`` splits the value dim by 32 for one or two requests and by 64 for more, and starts ``HEAD_DIM // 64`` programs:
one, for 96. The output is taken from uninitialised memory there and the state keeps its old columns. Nothing is refused.

Needs torch, triton and an installed sglang, of which only the kernel file is loaded; runs in Triton's interpreter without a GPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from types import ModuleType

import torch
from torch import Tensor

HEADS, DIM = 2, 96


def load_kernels() -> ModuleType:
    """SGLang's kernel file on its own, without importing the package around it."""
    path = next(file.locate() for file in importlib.metadata.files("sglang") or () if file.name == "seg_la.py")
    spec = importlib.util.spec_from_file_location("seg_la", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["seg_la"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recurrence(q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """One request, token by token in float64: output ``[T, H, D]`` and the state after each token ``[T, H, D, D]``."""
    outs, states = [], []
    state = state.double()
    for query, key, value in zip(q.double(), k.double(), v.double(), strict=True):
        state = state * torch.exp(-slopes.double())[:, None, None] + key[:, :, None] * value[:, None, :]
        outs.append(torch.einsum("hd,hde->he", query, state) * DIM**-0.5)
        states.append(state)
    return torch.stack(outs), torch.stack(states)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def reproduce() -> dict[str, float]:
    """Relative error of the new states of three requests, in the columns that are computed and in the others."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    kernels = load_kernels()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, HEADS, DIM, generator=generator).to(device) for _ in range(3))
    states = torch.randn(3, HEADS, DIM, DIM, generator=generator).to(device)
    slopes = torch.tensor([0.0625, 0.0039], device=device)
    meta = kernels.SegLaMeta(
        batch_size=3,
        max_q_length=2,
        q_offsets=torch.tensor([0, 2, 4, 6], dtype=torch.int32, device=device),
        s_offsets=torch.tensor([0, 1, 2], dtype=torch.int32, device=device),
        q_lengths=torch.tensor([2, 2, 2], dtype=torch.int32, device=device),
        s_scales=torch.tensor([1, 1, 1], dtype=torch.int32, device=device),
    )
    right = torch.stack(
        [recurrence(q[2 * r : 2 * r + 2], k[2 * r : 2 * r + 2], v[2 * r : 2 * r + 2], states[r], slopes)[1][-1] for r in range(3)]
    )
    kernels.seg_la_fwd(q, k, v, states, slopes, meta)
    return {
        "state columns 0 to 63": error(states[..., :64], right[..., :64]),
        "state columns 64 to 95": error(states[..., 64:], right[..., 64:]),
    }


def main() -> dict[str, float]:
    errors = reproduce()
    for what, size in errors.items():
        print(f"error against {what}: {size:.3g}")
    return errors


if __name__ == "__main__":
    main()
