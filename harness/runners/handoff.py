"""Handoff: the turns of one conversation, each prepared and run when the one before is done and has left its keys in the pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.draws import Prefix, extended
from attnmatrix.harness.model import TwoLayerModel
from attnmatrix.harness.runners.recorder import AttentionCall, Recorder, StepRun
from attnmatrix.harness.uninitialised import nan_in_new_tensors
from attnmatrix.harness.world import World


def run_handoff(world: World, backend: AttentionBackend) -> Iterator[StepRun]:
    """What a step has cached is what the steps before were given, and nothing but the backend has written it to the pool."""
    model = TwoLayerModel(world)
    for index, step in enumerate(world.steps):
        batch = world.batch(index)
        backend.prepare_metadata(batch)
        recorder = Recorder(backend, batch, world)
        with nan_in_new_tensors():
            final = model(step.hidden, step.inputs, recorder)
        yield StepRun(index, recorder.calls, final, problems=tuple(batch.changes(world.batch(index))))
        if index + 1 < len(world.steps):
            following = replace(world.steps[index + 1], prefixes=_cached(world, index, recorder.calls))
            world.steps = (*world.steps[: index + 1], following, *world.steps[index + 2 :])


def _cached(world: World, index: int, calls: list[AttentionCall]) -> tuple[Prefix, ...]:
    """What the requests have cached after a step: the keys and values that layer by layer were given, or, in linear kinds, the states
    in the pool, which were judged."""
    step, states = world.steps[index], world.context.states
    if states is None:
        return extended(step, [call.k.cpu() for call in calls], [call.v.cpu() for call in calls])
    layers = range(world.context.num_layers)
    return tuple(
        Prefix(states=tuple(states.as_kv(states.state(layer))[world.state_slots[request]].clone().cpu() for layer in layers))
        for request in step.requests
    )
