"""sglang 0.5.23: in an extend of one token per request no snapshot is taken.

``seg_la_fwd`` takes its decode kernel when there are no more new tokens than requests. That kernel has no arguments for snapshots, so
``track_lens`` and ``track_state_indices`` are dropped without a word.

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
    """Relative errors of the snapshot after the one token: against the right state, and against what its slot held before."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    kernels = load_kernels()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, DIM, generator=generator).to(device) for _ in range(3))
    states = torch.randn(2, HEADS, DIM, DIM, generator=generator).to(device)
    slopes = torch.tensor([0.0625, 0.0039], device=device)
    meta = kernels.SegLaMeta(
        batch_size=1,
        max_q_length=1,
        q_offsets=torch.tensor([0, 1], dtype=torch.int32, device=device),
        s_offsets=torch.tensor([0], dtype=torch.int32, device=device),
        q_lengths=torch.tensor([1], dtype=torch.int32, device=device),
        s_scales=torch.tensor([1], dtype=torch.int32, device=device),
    )
    right, held = recurrence(q, k, v, states[0], slopes)[1][0], states[1].double()
    track = torch.tensor([1], dtype=torch.int32, device=device)
    kernels.seg_la_fwd(q, k, v, states, slopes, meta, track_lens=track, track_state_indices=track)
    return {
        "the final state, in the live slot": error(states[0], right),
        "the state after the token, in the snapshot's slot": error(states[1], right),
        "what the snapshot's slot held before": error(states[1], held),
    }


def main() -> dict[str, float]:
    errors = reproduce()
    for what, size in errors.items():
        print(f"error against {what}: {size:.3g}")
    return errors


if __name__ == "__main__":
    main()
