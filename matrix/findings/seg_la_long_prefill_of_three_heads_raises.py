"""sglang 0.5.23: a prefill of 2,048 tokens or more with three heads raises, after the states have advanced.

From 2,048 tokens on ``seg_la_fwd`` adds its partial sums in a kernel whose one block is as wide as all heads together. A block's width must be a
power of two, which 3 heads of 64 are not; 3, 6, 12 or 24 heads on a rank are common. The prefill kernel has run by then: the request's state
holds the tokens already, so a retry counts them twice.

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

HEADS, DIM = 3, 64


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
    """Relative errors of the state in the slot after the exception: against what it held before, and against the state after all tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    kernels = load_kernels()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2048, HEADS, DIM, generator=generator).to(device) for _ in range(3))
    states = torch.randn(1, HEADS, DIM, DIM, generator=generator).to(device)
    slopes = torch.tensor([0.0625, 0.0039, 0.25], device=device)
    meta = kernels.SegLaMeta(
        batch_size=1,
        max_q_length=2048,
        q_offsets=torch.tensor([0, 2048], dtype=torch.int32, device=device),
        s_offsets=torch.tensor([0], dtype=torch.int32, device=device),
        q_lengths=torch.tensor([2048], dtype=torch.int32, device=device),
        s_scales=torch.tensor([1], dtype=torch.int32, device=device),
    )
    before, after = states[0].double(), recurrence(q, k, v, states[0], slopes)[1][-1]
    try:
        kernels.seg_la_fwd(q, k, v, states, slopes, meta)
    except Exception as raised:  # noqa: BLE001 - of Triton's interpreter or of its compiler
        print(f"{type(raised).__name__}: {raised}"[:200])
    else:
        raise SystemExit("nothing was raised")
    return {"the state after all tokens": error(states[0], after), "the state before the call": error(states[0], before)}


def main() -> dict[str, float]:
    errors = reproduce()
    for what, size in errors.items():
        print(f"error against {what}: {size:.3g}")
    return errors


if __name__ == "__main__":
    main()
