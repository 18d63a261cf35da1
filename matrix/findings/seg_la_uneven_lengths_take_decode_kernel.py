"""sglang 0.5.23 (0.5.10 alike): new lengths (2, 0) are computed as one token for each of two requests.

``seg_la_fwd`` takes its decode kernel whenever ``cdiv(total new tokens, batch size)`` is 1, whatever ``q_lengths`` says.
Token 1 of request 0 is then read as the token of request 1, whose state changes although it has no new token. With lengths
(0, 0, 2) the kernel besides reads a third token that does not exist and writes its output behind the end of ``tmp``.

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
    """Relative errors against the right output and against one token per request, and the change of a state that must stay."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    kernels = load_kernels()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, DIM, generator=generator).to(device) for _ in range(3))
    states = torch.randn(2, HEADS, DIM, DIM, generator=generator).to(device)
    slopes = torch.tensor([0.0625, 0.0039], device=device)
    meta = kernels.SegLaMeta(
        batch_size=2,
        max_q_length=2,
        q_offsets=torch.tensor([0, 2, 2], dtype=torch.int32, device=device),
        s_offsets=torch.tensor([0, 1], dtype=torch.int32, device=device),
        q_lengths=torch.tensor([2, 0], dtype=torch.int32, device=device),
        s_scales=torch.tensor([1, 1], dtype=torch.int32, device=device),
    )
    before = states.clone()
    out = kernels.seg_la_fwd(q, k, v, states, slopes, meta)
    each = [recurrence(q[r : r + 1], k[r : r + 1], v[r : r + 1], before[r], slopes)[0] for r in range(2)]
    return {
        "two tokens of request 0": error(out, recurrence(q, k, v, before[0], slopes)[0]),
        "one token per request": error(out, torch.cat(each)),
        "an unchanged state of request 1": error(states[1], before[1].double()),
    }


def main() -> dict[str, float]:
    errors = reproduce()
    for what, size in errors.items():
        print(f"error against {what}: {size:.3g}")
    return errors


if __name__ == "__main__":
    main()
