"""PCG extend: the traced model is split at its attention calls, and each piece is captured on its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module

from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.draws import LayerInputs
from attnmatrix.harness.graphs import GraphMaker, capturing, warm_up
from attnmatrix.harness.model import TwoLayerModel
from attnmatrix.harness.runners.recorder import Recorder, StepRun
from attnmatrix.harness.runners.split_graph import AttentionPoint, SplitGraph, run_split_graph
from attnmatrix.harness.runners.static_tokens import StaticTokens
from attnmatrix.harness.world import World


@fx.wrap
def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stands for an attention call in the traced model; never run."""
    raise NotImplementedError


class _Flat(torch.nn.Module):
    """The model as a function of tensors: hidden, then q, k and v of each layer."""

    def __init__(self, model: TwoLayerModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden: Tensor, q0: Tensor, k0: Tensor, v0: Tensor, q1: Tensor, k1: Tensor, v1: Tensor) -> Tensor:
        planned = LayerInputs(q0, k0, v0), LayerInputs(q1, k1, v1)
        out: Tensor = self.model(hidden, planned, attention)
        return out


def split_at_attention(model: TwoLayerModel) -> fx.GraphModule:
    """The model as a chain of submodules, each either one attention call or a piece without any."""
    traced = fx.symbolic_trace(_Flat(model))
    parts: dict[fx.Node, int] = {}
    part = 0
    for node in traced.graph.nodes:
        is_attention = node.target is attention
        part += is_attention
        parts[node] = part
        part += is_attention
    return split_module(traced, traced, lambda node: parts[node])


class _Capture(fx.Interpreter):
    """Runs the chain once: a piece is warmed up and captured, attention runs eagerly."""

    def __init__(self, chain: fx.GraphModule, split: SplitGraph, attend: Recorder, make: GraphMaker) -> None:
        super().__init__(chain)
        self._split, self._attend, self._make = split, attend, make

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        piece = self.fetch_attr(target)
        call = next((node for node in piece.graph.nodes if node.target is attention), None)
        if call is not None:
            given = dict(zip((node for node in piece.graph.nodes if node.op == "placeholder"), args, strict=True))
            layer, *qkv = call.args
            point = AttentionPoint.after(layer, *(given[node] for node in qkv))
            point.run(self._attend, self._split.tokens.tokens)
            self._split.points.append(point)
            return point.out
        warm_up(self._split.tokens.hidden.device, lambda: piece(*args))
        graph = self._make()
        with capturing(graph):
            out = piece(*args)
        self._split.graphs.append(graph)
        return out


def run_piecewise(world: World, backend: AttentionBackend) -> Iterator[StepRun]:
    """Extend through a piecewise graph; attention uses the backend's eager metadata."""

    def capture(model: TwoLayerModel, tokens: StaticTokens, attend: Recorder) -> SplitGraph:
        split = SplitGraph(tokens)
        inputs = [tensor for planned in tokens.inputs for tensor in (planned.q, planned.k, planned.v)]
        split.final = _Capture(split_at_attention(model), split, attend, GraphMaker(world.device)).run(tokens.hidden, *inputs)
        return split

    return run_split_graph(world, backend, capture)
