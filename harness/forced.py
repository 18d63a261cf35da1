"""A backend whose outputs are noted but replaced by another run's, so that every layer gets that run's inputs, and a run of padded
batches without a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.model import TwoLayerModel
from attnmatrix.harness.runners.recorder import Recorder, StepRun
from attnmatrix.harness.runners.static_batch import StaticBatch
from attnmatrix.harness.world import World

Seen = Callable[[int, int, Tensor], None]
"""``(step, layer, output)``: told of each output as it is made, where no graph is captured."""


@dataclass(frozen=True)
class _Static:
    """Buffers of one captured call: the inner backend's output, the output given instead, and which tokens ``[T, 1, 1]`` are live."""

    noted: Tensor
    given: Tensor
    live: Tensor


class ForcedBackend(AttentionBackend):
    """``inner`` in a world whose steps produced ``outputs`` (per step and layer) in another run. Padded tokens keep their own output.

    ``found[step, layer]`` holds the inner backend's own outputs; those that a graph computes are collected by :meth:`collect` after
    each replay.
    """

    def __init__(self, world: World, inner: AttentionBackend, outputs: Sequence[Sequence[Tensor]], seen: Seen) -> None:
        super().__init__(world.context)
        self.inner, self.outputs, self.seen = inner, outputs, seen
        self.steps: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for index, step in enumerate(world.steps):
            rows = tuple(world.req_rows[request] for request in step.requests)
            self.steps.setdefault((rows, step.case.new_lens), []).append(index)
        self.found: dict[tuple[int, int], Tensor] = {}
        self.static: dict[tuple[int, int], _Static] = {}  # by padded size and layer
        self.replaying: tuple[int, int, int] | None = None  # padded size, step, live tokens
        self.in_graph = False

    def prepare_metadata(self, batch: Batch) -> None:
        self.inner.prepare_metadata(batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        own = self.inner.forward(q, k, v, layer_id, batch)
        if self.in_graph:
            key = (batch.padded_reqs, layer_id)
            if key not in self.static:
                none = torch.zeros(own.shape[0], 1, 1, dtype=torch.bool, device=own.device)
                self.static[key] = _Static(torch.zeros_like(own), torch.zeros_like(own), none)
            static = self.static[key]
            static.noted.copy_(own)
            return torch.where(static.live, static.given, own)
        step = self._step(batch, layer_id)
        if step is None:
            return own
        given, live = own.clone(), len(self.outputs[step][layer_id])
        given[:live] = self.outputs[step][layer_id]
        self.found[step, layer_id] = own[:live].clone()
        self.seen(step, layer_id, own[:live])
        return given

    def _step(self, batch: Batch, layer: int) -> int | None:
        """The step that a batch is; None for the dummy batch of a warm-up. Requests have a row of their own each; of batches that may look
        alike (a story's, and those in rows that others had) the first whose ``layer`` has not run."""
        rows = tuple(batch.req_pool_indices[: batch.size].tolist())
        alike = self.steps.get((rows, batch.new_lens[: batch.size]), [])
        return next((index for index in alike if (index, layer) not in self.found), alike[-1] if alike else None)

    def commit(self, accepted: Tensor, batch: Batch) -> None:
        self.inner.commit(accepted, batch)

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        self.inner.init_capture_graph(max_seq_len, batch_sizes)
        self.in_graph = True

    def prepare_for_capture(self, batch: Batch) -> None:
        self.inner.prepare_for_capture(batch)

    def prepare_for_replay(self, batch: Batch) -> None:
        self.inner.prepare_for_replay(batch)
        step = self._step(batch, 0)
        assert step is not None
        live = len(self.outputs[step][0])
        for layer, out in enumerate(self.outputs[step]):
            static = self.static[batch.padded_reqs, layer]
            static.given[:live] = out
            static.live.zero_()[:live] = True
        self.replaying = batch.padded_reqs, step, live

    def collect(self) -> None:
        """Note the outputs of the replay that just ran."""
        if self.replaying is not None:
            size, step, live = self.replaying
            for layer in range(len(self.outputs[step])):
                self.found[step, layer] = self.static[size, layer].noted[:live].clone()
            self.replaying = None


def run_padded(world: World, backend: AttentionBackend) -> Iterator[StepRun]:
    """The padded batches of a decode or verify graph, run eagerly: what a graph computes, short of what capturing itself changes."""
    model = TwoLayerModel(world)
    static = {size: StaticBatch(world, size) for size in world.schedule.captures}
    for index, step in enumerate(world.schedule.steps):
        buffers = static[step.padded]
        world.enter(index)
        batch = buffers.load(index, step.fill)
        backend.prepare_metadata(batch)
        recorder, live = Recorder(backend, batch, world), batch.size * buffers.width
        final = model(buffers.tokens.hidden, buffers.tokens.inputs, recorder)
        yield StepRun(index, [call.first(live) for call in recorder.calls], final[:live])
