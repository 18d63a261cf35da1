"""Eager: prepare every batch, then run them one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.model import TwoLayerModel
from attnmatrix.harness.runners.recorder import Recorder, StepRun
from attnmatrix.harness.uninitialised import nan_in_new_tensors
from attnmatrix.harness.world import World


def run_eager(world: World, backend: AttentionBackend) -> Iterator[StepRun]:
    """Prepare A, prepare B, run A, run B: metadata must not live in one place. Serves eager and verify.

    Requests that take over places of others are prepared when those are done.

    In a story accepted draft tokens are committed after their verify. The needle probe asks for the LSE of rows that return it.
    """
    model = TwoLayerModel(world)
    ahead = [index for index, step in enumerate(world.schedule.steps) if not step.recycles]
    batches = {index: world.batch(index) for index in ahead}
    for batch in batches.values():
        backend.prepare_metadata(batch)
    for index in range(len(world.steps)):
        if index not in batches:
            world.enter(index)
            batches[index] = world.batch(index)
            backend.prepare_metadata(batches[index])
        batch = batches[index]
        recorder = Recorder(backend, batch, world, with_lse=world.probe.inputs == "needle" and backend.returns_lse)
        with nan_in_new_tensors():
            final = model(world.steps[index].hidden, world.steps[index].inputs, recorder)
        yield StepRun(index, recorder.calls, final, problems=tuple(batch.changes(world.batch(index))))
        accepted = world.schedule.steps[index].accepted
        if accepted is not None:
            backend.commit(torch.tensor(accepted, device=world.device), batch)
