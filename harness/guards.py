"""Bit-for-bit guards: what a step may write, and that it wrote exactly that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnmatrix.cases.case import ForwardMode
from attnmatrix.harness.draws import NUM_LAYERS
from attnmatrix.harness.pools import bits
from attnmatrix.harness.produced import held
from attnmatrix.harness.quantise import steps_apart
from attnmatrix.harness.world import World

if TYPE_CHECKING:
    from attnmatrix.harness.batch import Batch
    from attnmatrix.harness.runners.recorder import AttentionCall, StepRun


class Guards:
    """Remembers every pool and table of a world and checks them after each step.

    After a step the changed KV slots of a layer are exactly those of ``out_loc`` and hold the given k and v, in a quantised pool to within one
    step of its dtype (a package may quantise by itself, and break ties otherwise); states changed
    only in the batch's own slots (not at all in target_verify); tables, inputs, canaries and everything else are as before.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        context = world.context
        constants = {"sinks": context.sinks, "alibi_slopes": context.alibi_slopes, "slopes": context.slopes}
        self._constants = {"req_to_token": world.req_to_token, **{n: t for n, t in constants.items() if t is not None}}
        self._before = {name: tensor.clone() for name, tensor in self._constants.items()}
        self._entered = world.entered
        self._remember()

    def _remember(self) -> None:
        kv, states = self.world.context.kv, self.world.context.states
        self._kv = self._states = None  # frees what was remembered before: pools may fill most of the memory
        self._kv = kv.snapshot() if kv is not None else None
        self._states = states.snapshot() if states is not None else None

    def _hand_over(self) -> None:
        """Let what was remembered follow what the world has handed over since."""
        for index in range(self._entered + 1, self.world.entered + 1):
            self.world.hand_over(index, self._before["req_to_token"], self._kv, self._states)
        self._entered = self.world.entered

    def untouched(self) -> list[str]:
        """What changed since the last check, for a run that was refused: the new tokens' own slots may hold them already,
        since keys and values are written before a kernel is asked, nothing else may differ."""
        self._hand_over()
        return [*self._tables(), *self._canaries(), *self._compare_kv({}), *self._compare_states({}, {})]

    def beyond_scratch(self) -> list[str]:
        """What changed outside the scratch page since the last check: nothing, after the warm-up and capture of a graph."""
        return [*self._tables(), *self._canaries(), *self._compare_kv({}, spare_own=False), *self._compare_states({}, {})]

    def check(self, run: StepRun) -> list[str]:
        """One line for each violation of one step, empty when all is as it should be."""
        world, step = self.world, self.world.steps[run.index]
        self._expect_commit(run.index - 1)
        self._hand_over()
        batch = world.batch(run.index)
        problems = [*self._tables(), *self._canaries()]
        for call in run.calls:
            problems += [f"layer {call.layer}: forward modified its input {name}" for name in call.changed_inputs()]
        if world.context.kv is not None:
            problems += self._compare_kv({call.layer: (call.k, call.v) for call in run.calls}, batch.out_loc)
        if world.context.states is not None:
            verify = step.case.forward is ForwardMode.TARGET_VERIFY
            rows = [r for r, new in enumerate(step.case.new_lens) if new or not step.case.prefix_lens[r]]
            own = {world.state_slots[step.requests[r]] for r in rows}
            own |= {world.track_slots[r] for r in step.requests if step.case.track_lens and r in world.track_slots}
            spots = {(r, d) for r, new in enumerate(step.case.new_lens) for d in range(new)}
            problems += self._compare_states({} if verify else dict.fromkeys(range(NUM_LAYERS), own), spots if verify else {})
        self._remember()
        return problems or [line for call in run.calls for line in self._late(call, batch)]

    def _late(self, call: AttentionCall, batch: Batch) -> list[str]:
        """What the batch's own slots of a layer hold must be there when that layer's call returns: the next layer, or another batch, may run."""
        now = held(self.world.context, batch, call.layer)
        same = all(torch.equal(bits(then[: len(later)]), bits(later)) for then, later in zip(call.left, now, strict=bool(call.left)))
        return [] if same else [f"layer {call.layer}: the batch's own slots were written after the layer's call had returned"]

    def _expect_commit(self, index: int) -> None:
        """What was remembered, as the commit after step ``index`` should have left it: bits of the intermediate states."""
        accepted = self.world.steps[index].accepted if index >= 0 else None
        if self._states is None or accepted is None:
            return
        for layer in range(NUM_LAYERS):
            state, drafted = self._states.state(layer), self._states.intermediate(layer)
            for row, (request, count) in enumerate(zip(self.world.steps[index].requests, accepted, strict=True)):
                if count:
                    state[self.world.state_slots[request]] = drafted[row, count - 1]

    def _tables(self) -> list[str]:
        return [f"{name} was modified" for name, tensor in self._constants.items() if not torch.equal(self._before[name], tensor)]

    def _canaries(self) -> list[str]:
        pools = [("KV", self.world.context.kv), ("state", self.world.context.states)]
        return [
            f"{name} pool buffer {index}: written out of bounds (canary changed)"
            for name, pool in pools
            if pool is not None
            for index, fenced in enumerate(pool.fenced)
            if fenced.broken()
        ]

    def _compare_kv(self, written: dict[int, tuple[Tensor, Tensor]], own: Tensor | None = None, spare_own: bool = True) -> list[str]:
        """``own``: the slots of the step that wrote; None where none did, when the new tokens' slots of any step may be spared."""
        world, kv = self.world, self.world.context.kv
        if kv is None or self._kv is None:
            return []
        out_loc = torch.cat([world.batch(index).out_loc for index in range(len(world.steps))]) if own is None else own
        page, offset = out_loc // kv.page_size, out_loc % kv.page_size
        problems = []
        for layer in range(NUM_LAYERS):
            for name, old, now in (("K", self._kv.k(layer), kv.k(layer)), ("V", self._kv.v(layer), kv.v(layer))):
                want, found = kv.by_page(old), kv.by_page(now)
                if layer in written:
                    want[page, offset] = kv.as_held(layer, *written[layer])[0 if name == "K" else 1]
                differs = bits(found.contiguous()) != bits(want.contiguous())
                if layer in written and kv.quantised:
                    differs[page, offset] &= steps_apart(found[page, offset], want[page, offset]) > 1
                wrong = differs.flatten(2).any(dim=-1).flatten()
                if own is None and spare_own:
                    wrong[out_loc] = False
                if world.pool_plan.scratch_page is not None:
                    wrong[world.scratch_slots] = False
                if bool(wrong.any()):
                    problems.append(self._describe(layer, name, wrong, set(out_loc.tolist()) if own is not None else set()))
        return problems

    def _describe(self, layer: int, name: str, wrong: Tensor, out_loc: set[int]) -> str:
        slots = wrong.nonzero().flatten().tolist()
        inside = [slot for slot in slots if slot in out_loc]
        outside = [slot for slot in slots if slot not in out_loc]
        parts = []
        if inside:
            parts.append(f"{len(inside)} of {len(out_loc)} slots in out_loc do not hold the given {name} (first: {self.owner(inside[0])})")
        if outside:
            parts.append(f"{len(outside)} slots outside out_loc changed (first: {self.owner(outside[0])})")
        return f"layer {layer}, {name} pool: " + "; ".join(parts)

    def owner(self, slot: int) -> str:
        """``slot 37, page 2, request 1 position 5`` of a physical slot."""
        size = self.world.pool_plan.page_size
        for step in self.world.steps:
            for request, length in zip(step.requests, step.case.kv_lens, strict=True):
                hits = (self.world.slots(request, 0, length) == slot).nonzero()
                if len(hits):
                    return f"slot {slot}, page {slot // size}, request {request} position {int(hits[0])}"
        return f"slot {slot}, page {slot // size}, no request's"

    def _state_owner(self, slot: int) -> str:
        slots = self.world.state_slots
        return f"state slot {slot}, " + (f"request {slots.index(slot)}'s" if slot in slots else "no request's")

    def _compare_states(self, own: dict[int, set[int]], spots: set[tuple[int, int]] | dict[int, set[int]]) -> list[str]:
        states = self.world.context.states
        if states is None or self._states is None:
            return []
        problems = []
        for layer in range(NUM_LAYERS):
            old, old_drafted = self._states.state(layer), self._states.intermediate(layer)
            changed = (bits(old) != bits(states.state(layer))).flatten(1).any(dim=-1).nonzero().flatten().tolist()
            foreign = [slot for slot in changed if slot not in own.get(layer, set())]
            if foreign:
                owners = ", ".join(self._state_owner(slot) for slot in foreign[:4])
                problems.append(f"layer {layer}: {len(foreign)} states changed that the batch does not own or may not write ({owners})")
            drafted = (bits(old_drafted) != bits(states.intermediate(layer))).flatten(2).any(dim=-1).nonzero().tolist()
            stray = [tuple(spot) for spot in drafted if tuple(spot) not in spots]
            if stray:
                problems.append(f"layer {layer}: intermediate states (row, draft) {stray[:4]} changed though no draft token owns them")
        return problems
