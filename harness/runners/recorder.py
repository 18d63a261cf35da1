"""What one step of a run left behind: every attention call with its exact inputs and output."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.pools import bits
from attnmatrix.harness.produced import held

if TYPE_CHECKING:
    from attnmatrix.harness.world import World


class ContractError(Exception):
    """A row broke the contract in a way that leaves nothing to compare (wrong shape, dtype or device of an output)."""


@dataclass
class AttentionCall:
    """One call of ``forward``: inputs as they were before it, inputs as they are after it, output ``[T, Hq, D]``.

    ``raw`` is the tensor the backend returned, before translation; graph runners overwrite it between replays. ``lse`` ``[T, Hq]`` is in
    nats, None when it was not asked for. ``left`` is what the pool held of the batch's own slots right after the call.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    given: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    raw: Tensor
    lse: Tensor | None = None
    left: tuple[Tensor, ...] = ()

    def first(self, tokens: int) -> AttentionCall:
        """The call cut to its first ``tokens`` tokens."""
        q, k, v = (tensor[:tokens] for tensor in self.given)
        return replace(
            self, q=self.q[:tokens], k=self.k[:tokens], v=self.v[:tokens], given=(q, k, v), out=self.out[:tokens], raw=self.raw[:tokens]
        )

    def changed_inputs(self) -> list[str]:
        """Names of the inputs that the backend modified."""
        kept = (("q", self.q), ("k", self.k), ("v", self.v))
        return [
            name
            for (name, before), after in zip(kept, self.given, strict=True)
            if not torch.equal(bits(before.contiguous()), bits(after.contiguous()))
        ]


@dataclass
class StepRun:
    """One step of the schedule, run. ``replays`` counts graph replays (0 in eager modes), ``graph`` is their kind (``cuda``,
    ``tape`` or ``none``), ``problems`` what the runner itself found wrong. In graph modes the tensors are those of the graph,
    cut to the live rows: the next replay overwrites them.
    """

    index: int
    calls: list[AttentionCall]
    final: Tensor
    replays: int = 0
    graph: str = "none"
    problems: tuple[str, ...] = ()


@dataclass
class Recorder:
    """The attention function handed to the model: calls the backend and records; ``with_lse`` asks for the LSE too."""

    backend: AttentionBackend
    batch: Batch
    world: World
    with_lse: bool = False
    calls: list[AttentionCall] = field(default_factory=list)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        conventions = self.world.conventions
        before, lse = (q.clone(), k.clone(), v.clone()), None
        if self.with_lse:
            raw, lse = self.backend.forward_with_lse(q, k, v, layer, self.batch)
            lse = translate_lse(lse, q, conventions)
        else:
            raw = self.backend.forward(q, k, v, layer, self.batch)
        out = translate_output(raw, q, conventions)
        left = held(self.world.context, self.batch, layer)
        self.calls.append(AttentionCall(layer, *before, (q, k, v), out.clone(), raw, lse, left))
        return out


def translate_lse(raw: Tensor, q: Tensor, conventions: Conventions) -> Tensor:
    """The backend's LSE in nats, float64 ``[T, Hq]``. Raises ContractError when it is no float32 tensor of that shape."""
    found = f"{raw.dtype} {tuple(raw.shape)} on {raw.device}" if isinstance(raw, Tensor) else type(raw).__name__
    expected = f"{torch.float32} {tuple(q.shape[:2])} on {q.device}"
    if found != expected:
        raise ContractError(f"forward_with_lse returned {found} as LSE, expected {expected}")
    return raw.double() * (math.log(2) if conventions.lse_base == "2" else 1.0)


def translate_output(raw: Tensor, q: Tensor, conventions: Conventions) -> Tensor:
    """The backend's output as ``[T, Hq, D]``. Raises ContractError when it is not what the convention declares."""
    if not isinstance(raw, Tensor):
        raise ContractError(f"forward returned {type(raw).__name__}, expected a tensor")
    expected = q.shape if conventions.output == "per_head" else (q.shape[0], q.shape[1] * q.shape[2])
    if tuple(raw.shape) != tuple(expected):
        raise ContractError(f"forward returned shape {tuple(raw.shape)}, expected {tuple(expected)} ({conventions.output})")
    if raw.dtype != q.dtype or raw.device != q.device:
        raise ContractError(f"forward returned {raw.dtype} on {raw.device}, expected {q.dtype} on {q.device}")
    return raw.view(q.shape) if conventions.output == "flat" else raw
