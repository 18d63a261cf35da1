"""What a call, and a step, left in the pools for the requests of its batch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import ForwardMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.context import Context
from attnmatrix.harness.world import World


def held(context: Context, batch: Batch, layer: int) -> tuple[Tensor, ...]:
    """What a layer's pool holds of a batch's own slots: keys and values ``[T, Hkv, D]``; or states, and intermediate states of target_verify,
    by request. Copies that a graph can make."""
    if context.kv is not None:
        page, offset = batch.out_loc // context.page_size, batch.out_loc % context.page_size
        return tuple(context.kv.by_page(tensor)[page, offset] for tensor in (context.kv.k(layer), context.kv.v(layer)))
    if context.states is None or batch.state_indices is None:
        return ()
    if batch.forward_mode.seq_lens_is_prefix:
        return (context.states.intermediate(layer)[: batch.padded_reqs].clone(),)
    return (context.states.state(layer)[batch.state_indices.long()],)


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
