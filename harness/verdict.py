"""The verdict over one step: measurements of everything it produced and the guards' findings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnmatrix.harness.draws import StepData
from attnmatrix.harness.expected import Quantity, expected_quantities
from attnmatrix.harness.guards import Guards
from attnmatrix.harness.measure import Measurement, measure
from attnmatrix.harness.pieces import stale_pieces
from attnmatrix.harness.runners.recorder import AttentionCall, StepRun
from attnmatrix.harness.world import World


@dataclass(frozen=True)
class StepVerdict:
    """Everything known about one step; it passed when no ratio is above 1 and no guard complained."""

    measurements: tuple[Measurement, ...]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems and self.margin <= 1.0

    @cached_property
    def margin(self) -> float:
        """Largest error/limit ratio of the step, 0 when nothing was measured."""
        return max((float(m.ratio.max()) for m in self.measurements if m.error.numel()), default=0.0)


def judge_step(world: World, run: StepRun, guards: Guards) -> StepVerdict:
    """Judge every layer of one step against the reference, then the guards."""
    step = world.steps[run.index]
    measurements: list[Measurement] = []
    problems: list[str] = []
    layers = [call.layer for call in run.calls]
    if layers != list(range(world.context.num_layers)):
        problems.append(f"attention ran for layers {layers}, expected each of {world.context.num_layers} once")
    for call in run.calls if step.case.batch_size else ():
        quantities = expected_quantities(world, run.index, call)
        for name, quantity in quantities.items():
            actual = _actual(world, step, call, name, quantity)
            if actual is not None:
                measurements.append(
                    measure(
                        name,
                        run.index,
                        call.layer,
                        quantity.labels,
                        actual.to(quantity.reference.device),
                        quantity.reference,
                        quantity.baseline,
                        quantity.conditioning,
                        world.dtype,
                        quantity.absolute,
                    )
                )
    if not bool(torch.isfinite(run.final).all()):
        problems.append("the model's output is not finite")
    if run.graph != "none":
        problems += stale_pieces(world, run)
    return StepVerdict(tuple(measurements), (*problems, *run.problems, *guards.check(run)))


def _actual(world: World, step: StepData, call: AttentionCall, name: str, quantity: Quantity) -> Tensor | None:
    """What the backend produced for one quantity, shaped like its reference; None when it does not give it."""
    if name == "out":
        return call.out
    if name == "lse":
        return call.lse[..., None] if call.lse is not None else None
    states = world.context.states
    if states is None:
        return None
    if name == "state":
        slots = [world.state_slots[request] for request in step.requests]
        found = states.as_kv(states.state(call.layer))[slots].clone()
        for row, (prefix, new) in enumerate(zip(step.case.prefix_lens, step.case.new_lens, strict=True)):
            if not prefix and not new:
                found[row] = quantity.reference[row].to(found)  # a request without a token has no state to be right about
        return found
    if name == "snapshot":
        return states.as_kv(states.state(call.layer))[[world.track_slots[r] for r in step.requests if r in world.track_slots]].clone()
    drafted = states.as_kv(states.intermediate(call.layer))
    return torch.cat([drafted[row, :new] for row, new in enumerate(step.case.new_lens)])
