"""BCG extend: one capture pass in which every attention call ends the current graph and starts the next."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.graphs import Graph, GraphMaker, warm_up
from attnmatrix.harness.model import TwoLayerModel
from attnmatrix.harness.runners.recorder import Recorder, StepRun
from attnmatrix.harness.runners.split_graph import AttentionPoint, SplitGraph, run_split_graph
from attnmatrix.harness.runners.static_tokens import StaticTokens
from attnmatrix.harness.world import World


def run_breakable(world: World, backend: AttentionBackend) -> Iterator[StepRun]:
    """Extend through a breakable graph; attention uses the backend's eager metadata."""

    def capture(model: TwoLayerModel, tokens: StaticTokens, attend: Recorder) -> SplitGraph:
        warmed = warm_up(world.device, lambda: model(tokens.hidden, tokens.inputs, attend))
        split = break_at_attention(model, tokens, attend, GraphMaker(world.device))
        split.warmed = warmed
        return split

    return run_split_graph(world, backend, capture)


def break_at_attention(model: TwoLayerModel, tokens: StaticTokens, attend: Recorder, make: GraphMaker) -> SplitGraph:
    """Run the model once on ``tokens``, capturing all of it but the attention calls."""
    split = SplitGraph(tokens)
    current: list[Graph] = []  # the one that captures, none while attention runs

    def start() -> None:
        current.append(make())
        current[0].begin()

    def stop() -> None:
        graph = current.pop()
        graph.end()
        split.graphs.append(graph)

    def pause(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stop()
        point = AttentionPoint.after(layer, q, k, v)
        point.run(attend, tokens.tokens)
        split.points.append(point)
        start()
        return point.out

    start()
    try:
        split.final = model(tokens.hidden, tokens.inputs, pause)
    except BaseException:
        for graph in current:
            graph.abort()
        raise
    stop()
    return split
