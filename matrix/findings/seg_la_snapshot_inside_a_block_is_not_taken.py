"""sglang 0.5.23: a snapshot that is not at a multiple of 32 tokens is not taken, without a word.

``seg_la_fwd`` is asked to copy the state after ``track_lens`` tokens to another slot. Its prefill kernel looks only at the end of each block of
32 tokens (and at the last token), and writes nothing for any other length: a later request that resumes the slot gets what was there before.
The engine around it asks for multiples of its cache chunk only.

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

HEADS, DIM = 2, 64


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
    """Relative errors of two snapshots after 32 and 33 of 40 tokens, and of the second against what its slot held before."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    kernels = load_kernels()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(40, HEADS, DIM, generator=generator).to(device) for _ in range(3))
    slopes = torch.tensor([0.0625, 0.0039], device=device)
    meta = kernels.SegLaMeta(
        batch_size=1,
        max_q_length=40,
        q_offsets=torch.tensor([0, 40], dtype=torch.int32, device=device),
        s_offsets=torch.tensor([0], dtype=torch.int32, device=device),
        q_lengths=torch.tensor([40], dtype=torch.int32, device=device),
        s_scales=torch.tensor([0], dtype=torch.int32, device=device),
    )
    right, errors = recurrence(q, k, v, torch.zeros(HEADS, DIM, DIM, device=device), slopes)[1], {}
    for length in (32, 33):
        states = torch.full((2, HEADS, DIM, DIM), 54321.0, device=device)
        track = {"track_lens": torch.tensor([length], dtype=torch.int32, device=device)}
        track["track_state_indices"] = torch.tensor([1], dtype=torch.int32, device=device)
        kernels.seg_la_fwd(q, k, v, states, slopes, meta, **track)
        errors[f"the state after {length} tokens"] = error(states[1], right[length - 1])
    errors["what the slot held, after 33 tokens"] = error(states[1], torch.full_like(states[1], 54321.0).double())
    return errors


def main() -> dict[str, float]:
    errors = reproduce()
    for what, size in errors.items():
        print(f"error against {what}: {size:.3g}")
    return errors


if __name__ == "__main__":
    main()
