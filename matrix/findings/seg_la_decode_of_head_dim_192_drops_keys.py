"""sglang 0.5.23: decoding with head dim 192 leaves 64 of the 192 key dims out.

``seg_la_fwd`` gives each program of its decode kernel 128 key dims and starts ``head_dim // 128`` of them, one for 192. Key dims 128 to 191
contribute nothing to the output, and their rows of the state are neither decayed nor updated. Nothing is raised; the prefill kernel, which
splits by 32, takes the same head dim.

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

HEADS, DIM = 2, 192


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
    """Relative errors of the new state, in the key rows that are computed and in the others."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    kernels = load_kernels()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, DIM, generator=generator).to(device) for _ in range(3))
    states = torch.randn(1, HEADS, DIM, DIM, generator=generator).to(device)
    slopes = torch.tensor([0.0625, 0.0039], device=device)
    meta = kernels.SegLaMeta(
        batch_size=1,
        max_q_length=1,
        q_offsets=torch.tensor([0, 1], dtype=torch.int32, device=device),
        s_offsets=torch.tensor([0], dtype=torch.int32, device=device),
        q_lengths=torch.tensor([1], dtype=torch.int32, device=device),
        s_scales=torch.tensor([1], dtype=torch.int32, device=device),
    )
    out, after = recurrence(q, k, v, states[0], slopes)
    found = kernels.seg_la_fwd(q, k, v, states, slopes, meta)
    return {
        "state key rows 0 to 127": error(states[0, :, :128], after[0][:, :128]),
        "state key rows 128 to 191": error(states[0, :, 128:], after[0][:, 128:]),
        "the output": error(found, out),
    }


def main() -> dict[str, float]:
    errors = reproduce()
    for what, size in errors.items():
        print(f"error against {what}: {size:.3g}")
    return errors


if __name__ == "__main__":
    main()
