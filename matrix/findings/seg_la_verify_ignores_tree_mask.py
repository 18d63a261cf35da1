"""sglang 0.5.23: a draft tree is verified as a chain when intermediate states are asked for.

``seg_la_fwd`` has a kernel for tree masks (``meta.mask``) and one for intermediate states (``caches``), which a verify step
needs. Given both it takes the latter and drops the mask without a word, so siblings see each other.

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

HEADS, DIM = 2, 128


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
    """Relative error of the output against the tree (two children of the last cached token) and against a chain."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    kernels = load_kernels()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, DIM, generator=generator).to(device) for _ in range(3))
    states = torch.randn(1, HEADS, DIM, DIM, generator=generator).to(device)
    slopes = torch.tensor([0.0625, 0.0039], device=device)
    meta = kernels.SegLaMeta(
        batch_size=1,
        max_q_length=2,
        q_offsets=torch.tensor([0, 2], dtype=torch.int32, device=device),
        s_offsets=torch.tensor([0], dtype=torch.int32, device=device),
        q_lengths=torch.tensor([2], dtype=torch.int32, device=device),
        s_scales=torch.tensor([1], dtype=torch.int32, device=device),
        mask=torch.eye(2, dtype=torch.int32, device=device)[None],
    )
    caches = torch.zeros(1, 2, HEADS, DIM, DIM, device=device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    out = kernels.seg_la_fwd(q, k, v, states, slopes, meta, caches=caches, cache_indices=rows)
    siblings = [recurrence(q[i : i + 1], k[i : i + 1], v[i : i + 1], states[0], slopes)[0] for i in range(2)]
    return {
        "two siblings": error(out, torch.cat(siblings)),
        "a chain": error(out, recurrence(q, k, v, states[0], slopes)[0]),
    }


def main() -> dict[str, float]:
    errors = reproduce()
    for what, size in errors.items():
        print(f"error against {what}: {size:.3g}")
    return errors


if __name__ == "__main__":
    main()
