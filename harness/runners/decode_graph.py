"""CG decode and verify CG: the whole model in one graph per captured batch size, replayed on padded batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.graphs import Graph, GraphMaker, capturing, warm_up
from attnmatrix.harness.guards import Guards
from attnmatrix.harness.model import TwoLayerModel
from attnmatrix.harness.runners.capture_check import not_finite
from attnmatrix.harness.runners.recorder import AttentionCall, Recorder, StepRun
from attnmatrix.harness.runners.static_batch import StaticBatch
from attnmatrix.harness.uninitialised import nan_in_new_tensors
from attnmatrix.harness.world import World


@dataclass
class CapturedBatch:
    """One captured batch size: its graph, the buffers it reads and the tensors it leaves results in."""

    static: StaticBatch
    graph: Graph
    calls: list[AttentionCall]
    final: Tensor

    def outputs(self) -> list[Tensor]:
        return [self.final, *(tensor for call in self.calls for tensor in (call.raw, call.out))]


def run_decode_graph(world: World, backend: AttentionBackend) -> Iterator[StepRun]:
    """Capture every size of the schedule, the largest first, then replay its steps in order.

    Raises ValueError for a pool without a scratch page and for draft counts that differ between requests, which no such
    graph can take.
    """
    if len({new for batch in world.schedule.batches for new in batch.new_lens}) != 1:
        raise ValueError(f"runner mode {world.mode.value} needs the same number of tokens in every request, got {world.case.new_lens}")
    guards, model = Guards(world), TwoLayerModel(world)
    backend.init_capture_graph(world.context.max_seq_len, world.schedule.captures)
    captured: dict[int, CapturedBatch] = {}
    problems: list[str] = []
    for size in sorted(world.schedule.captures, reverse=True):
        captured[size] = _capture(world, backend, model, size, problems)
    problems += [f"warm-up or capture: {line}" for line in guards.beyond_scratch()]
    for index, step in enumerate(world.schedule.steps):
        yield _replay(captured[step.padded], backend, index, step.fill, problems)
        problems = []


def _capture(world: World, backend: AttentionBackend, model: TwoLayerModel, size: int, problems: list[str]) -> CapturedBatch:
    static = StaticBatch(world, size)
    batch, tokens = static.capture(), static.tokens
    backend.prepare_for_capture(batch)
    recorder = Recorder(backend, batch, world)
    graph = GraphMaker(world.device)()
    with nan_in_new_tensors():
        problems += not_finite(world, "warm-up", warm_up(world.device, lambda: model(tokens.hidden, tokens.inputs, recorder)))
        recorder.calls.clear()
        with capturing(graph):
            final = model(tokens.hidden, tokens.inputs, recorder)
    problems += not_finite(world, "capture", final)
    return CapturedBatch(static, graph, recorder.calls, final)


def _replay(captured: CapturedBatch, backend: AttentionBackend, index: int, fill: str, problems: list[str]) -> StepRun:
    static = captured.static
    static.world.enter(index)
    batch = static.load(index, fill)
    given = {name: tensor.clone() for name, tensor in static.fields.items()}
    backend.prepare_metadata(batch)
    backend.prepare_for_replay(batch)
    for tensor in captured.outputs():
        tensor.fill_(float("nan"))
    with nan_in_new_tensors():
        captured.graph.replay()
    changed = [f"the backend modified batch.{name}" for name, tensor in static.fields.items() if not torch.equal(tensor, given[name])]
    live = batch.size * static.width
    calls = [call.first(live) for call in captured.calls]
    return StepRun(index, calls, captured.final[:live], 1, captured.graph.kind, (*problems, *changed))
