"""The verdict for callers without a row: an engine's own test lays a case out, runs its own code on it, and has the outcome judged.

    laid = lay_out(parse_case("extend-p16-prefix0.8.16-new15.8.1-h4x2x128-bf16-shuffled"), device="cuda")
    outputs = [engine(layer.q, layer.k, layer.v, laid.context, laid.batch, number) for number, layer in enumerate(laid.layers)]
    verdict = judge(laid.case, outputs, laid)
    assert verdict.passed, verdict

The engine writes k and v into ``laid.context.kv`` at ``laid.batch.out_loc`` (or updates ``laid.context.states``) itself, as in the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.cases.schedule import schedule
from attnmatrix.cases.suites import modes_of
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.context import Context
from attnmatrix.harness.draws import LayerInputs
from attnmatrix.harness.guards import Guards
from attnmatrix.harness.probes import PROBES
from attnmatrix.harness.runners.recorder import AttentionCall, StepRun, translate_lse, translate_output
from attnmatrix.harness.trial import describe_verdicts
from attnmatrix.harness.verdict import StepVerdict, judge_step
from attnmatrix.harness.world import World


@dataclass(frozen=True)
class Verdict:
    """``margin`` is the largest error over its limit; ``lines`` what is wrong, the worst first. Its text is those lines."""

    passed: bool
    margin: float
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines) or f"passed, largest error {self.margin:.2f} of its limit"


class LaidOut:
    """A case made concrete: ``context`` (pools, ``req_to_token``, scale ...), ``batch``, and each layer's ``q``, ``k``, ``v``."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.case: Case = world.case
        self.context: Context = world.context
        self.batch: Batch = world.batch(0)
        self.layers: tuple[LayerInputs, ...] = world.steps[0].inputs
        self._given = [(layer.q.clone(), layer.k.clone(), layer.v.clone()) for layer in self.layers]
        self._guards: Guards | None = Guards(world)

    def verdict(self, outputs: Sequence[Tensor], lses: Sequence[Tensor] | None) -> StepVerdict:
        """Judge one run's outputs and pools, once: the guards compare with what was laid out. Raises RuntimeError the second time."""
        guards, self._guards = self._guards, None
        if guards is None:
            raise RuntimeError("these pools were judged already: lay the case out again")
        calls = []
        for layer, (before, planned, raw) in enumerate(zip(self._given, self.layers, outputs, strict=True)):
            out = translate_output(raw, planned.q, self.world.conventions)
            lse = translate_lse(lses[layer], planned.q, self.world.conventions) if lses is not None else None
            calls.append(AttentionCall(layer, *before, (planned.q, planned.k, planned.v), out, raw, lse))
        return judge_step(self.world, StepRun(0, calls, torch.zeros(())), guards)


def lay_out(case: Case, device: str = "cpu", probe: str = "peaked", conventions: Conventions | None = None) -> LaidOut:
    """Pools, tables and inputs of a case. ``probe`` is ``peaked``, ``needle`` or ``poison``; ``conventions`` are those of a row (layouts,
    window, LSE base). Raises ValueError for an unknown probe and for a case that no runner mode drives."""
    known = {known.name: known for known in PROBES}
    if probe not in known:
        raise ValueError(f"unknown probe {probe!r}; known: {', '.join(known)}")
    modes = modes_of(case)
    if not modes:
        raise ValueError(f"no runner mode drives {case.id}")
    mode = next((mode for mode in modes if not mode.uses_graph), modes[0])
    return LaidOut(World(case, mode, known[probe], conventions or Conventions(), torch.device(device), schedule(case, mode).first()))


def judge(case: Case, outputs: Sequence[Tensor], pools: LaidOut, lses: Sequence[Tensor] | None = None) -> Verdict:
    """The harness's verdict on one batch run by anybody: attention outputs per layer (``[T, Hq, D]``, or flat by declared convention), what
    the run left in the pools, and optionally its LSE per layer (float32 ``[T, Hq]``).

    Raises ValueError when the pools belong to another case or a layer is missing, ContractError for outputs of another shape or dtype.
    """
    if case != pools.case:
        raise ValueError(f"these pools were laid out for {pools.case.id}, not for {case.id}")
    if len(outputs) != len(pools.layers):
        raise ValueError(f"got {len(outputs)} outputs, expected one for each of {len(pools.layers)} layers")
    found = pools.verdict(outputs, lses)
    return Verdict(found.passed, found.margin, describe_verdicts((found,), pools.world.probe.name))
