"""What a step left in the state pool for the requests of its batch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import ForwardMode
from attnmatrix.harness.world import World


def produced_states(world: World, index: int, layer: int) -> dict[str, Tensor]:
    """Copies of ``state`` ``[R, H, K, V]``, ``snapshot`` of the requests that have one and, in target_verify, ``intermediate`` ``[T, H, K, V]`` after step ``index``.

    Empty for kinds without states. A request without any token has no state to be right about: its rows are zero.
    """
    states, step = world.context.states, world.steps[index]
    if states is None or not step.case.batch_size:
        return {}
    found = states.as_kv(states.state(layer))[[world.state_slots[request] for request in step.requests]].clone()
    for row, length in enumerate(step.case.kv_lens):
        if not length:
            found[row] = 0
    if step.case.forward is not ForwardMode.TARGET_VERIFY:
        taken = [world.track_slots[request] for request in step.requests if request in world.track_slots] if step.case.track_lens else []
        snapshots = {"snapshot": states.as_kv(states.state(layer))[taken].clone()} if taken else {}
        return {"state": found, **snapshots}
    drafted = states.as_kv(states.intermediate(layer))
    return {"state": found, "intermediate": torch.cat([drafted[row, :new] for row, new in enumerate(step.case.new_lens)])}
