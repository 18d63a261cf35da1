"""PCG and BCG extend: graphs of what lies between the attention calls, which themselves run eagerly on the real tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.graphs import Graph
from attnmatrix.harness.guards import Guards
from attnmatrix.harness.model import TwoLayerModel
from attnmatrix.harness.runners.capture_check import not_finite
from attnmatrix.harness.runners.recorder import Recorder, StepRun
from attnmatrix.harness.runners.static_tokens import StaticTokens, scratch_locations
from attnmatrix.harness.uninitialised import nan_in_new_tensors
from attnmatrix.harness.world import World


@dataclass(frozen=True)
class AttentionPoint:
    """Where a graph stops for attention: static ``q``, ``k``, ``v``, and ``out`` ``[tokens, Hq, D]`` for the next graph to read."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor

    @classmethod
    def after(cls, layer: int, q: Tensor, k: Tensor, v: Tensor) -> AttentionPoint:
        """A point with an output buffer of NaN."""
        return cls(layer, q, k, v, torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device))

    def run(self, attend: Recorder, live: int) -> None:
        """Attention of the first ``live`` tokens; the rows behind them keep what they hold."""
        self.out[:live].copy_(attend(self.layer, self.q[:live], self.k[:live], self.v[:live]))


@dataclass
class SplitGraph:
    """One captured token count: ``graphs`` and attention ``points`` alternate, a graph first and last. ``warmed`` is what the
    model gave in a warm-up of the whole, ``final`` where the last graph leaves its output."""

    tokens: StaticTokens
    graphs: list[Graph] = field(default_factory=list)
    points: list[AttentionPoint] = field(default_factory=list)
    final: Tensor = field(default_factory=lambda: torch.empty(0))
    warmed: Tensor | None = None

    def replay(self, attend: Recorder, live: int) -> None:
        for graph, point in zip(self.graphs, self.points, strict=False):
            graph.replay()
            point.run(attend, live)
        self.graphs[-1].replay()


Capture = Callable[[TwoLayerModel, StaticTokens, Recorder], SplitGraph]
"""``(model, buffers, attention on a dummy batch of all tokens) -> graph``, captured in one pass after a warm-up."""


def run_split_graph(world: World, backend: AttentionBackend, capture: Capture) -> Iterator[StepRun]:
    """Capture every token count of the schedule, the largest first, then replay its steps in order.

    Raises ValueError for a pool without a scratch page.
    """
    guards, model = Guards(world), TwoLayerModel(world)
    captured: dict[int, SplitGraph] = {}
    problems: list[str] = []
    for size in sorted(world.schedule.captures, reverse=True):
        batch = dummy_batch(world, size)
        backend.prepare_metadata(batch)
        with nan_in_new_tensors():
            captured[size] = capture(model, StaticTokens(world, size), Recorder(backend, batch, world))
        if (warmed := captured[size].warmed) is not None:
            problems += not_finite(world, "warm-up", warmed)
        problems += not_finite(world, "capture", captured[size].final)
    problems += [f"warm-up or capture: {line}" for line in guards.beyond_scratch()]
    for index, step in enumerate(world.schedule.steps):
        yield replace(_replay(world, backend, captured[step.padded], index), problems=tuple(problems))
        problems = []


def _replay(world: World, backend: AttentionBackend, graph: SplitGraph, index: int) -> StepRun:
    world.enter(index)
    step, batch = world.steps[index], world.batch(index)
    graph.tokens.fill(step, clear=world.schedule.steps[index].fill == "production")
    backend.prepare_metadata(batch)
    live = step.case.num_tokens
    graph.final.fill_(float("nan"))
    recorder = Recorder(backend, batch, world)
    with nan_in_new_tensors():
        graph.replay(recorder, live)
    return StepRun(index, recorder.calls, graph.final[:live], 1, graph.graphs[0].kind)


def dummy_batch(world: World, tokens: int) -> Batch:
    """An extend batch of ``tokens`` tokens for warm-up and capture: requests without prefix in request row 0, all of whose
    tokens are written to scratch and whose state slots are -1."""
    longest, device = world.context.max_seq_len, world.device
    lens = tuple(min(longest, tokens - start) for start in range(0, tokens, longest))
    positions = torch.cat([torch.arange(length) for length in lens]).to(device)
    return Batch(
        forward_mode=world.case.forward,
        size=len(lens),
        padded_reqs=len(lens),
        prefix_lens=(0,) * len(lens),
        new_lens=lens,
        kv_lens=lens,
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        req_pool_indices=torch.zeros(len(lens), dtype=torch.int64, device=device),
        out_loc=scratch_locations(world, tokens),
        positions=positions,
        cu_seqlens_q=torch.tensor([0, *lens]).cumsum(0).int().to(device),
        state_indices=torch.full((len(lens),), -1, dtype=torch.int32, device=device) if world.context.states is not None else None,
    )
