"""How close each planted fault comes to a failing row: the fault is run in the failing row's world, and every result compared.

Layers after the first get the failing row's own inputs, so that one rounding more or less does not grow from layer to layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.faults.fault import Fault
from attnmatrix.harness.forced import ForcedBackend, run_padded
from attnmatrix.harness.measure import FACTOR, limits, relative_rms
from attnmatrix.harness.probes import PROBES, Probe
from attnmatrix.harness.produced import produced_states
from attnmatrix.harness.registry import Row
from attnmatrix.harness.rounding import TF32_PRODUCTS, tf32
from attnmatrix.harness.runners import RUNNERS, Runner
from attnmatrix.harness.runners.eager import run_eager
from attnmatrix.harness.trial import Trial, run_trial
from attnmatrix.harness.world import World

SLACK = 2.0
"""Two results that are each within their limit of one value are within twice that limit of each other."""


@dataclass(frozen=True)
class Fit:
    """How close a fault comes to the failing row: ``ratio`` of the largest distance to its limit, ``error`` that distance itself;
    ``guards`` 0: the same guard problems, 1: of the same kinds, 2: others."""

    fault: Fault
    ratio: float
    error: float
    guards: int = 2


class _Differs(Exception):
    """Raised out of a run as soon as a result lies too far from the failing row's."""


class Search:
    """One failing trial and the worlds in which faults are run against it."""

    def __init__(self, row: Row, mode: RunnerMode, case: Case, device: torch.device, trial: Trial) -> None:
        self.row, self.mode, self.case, self.device, self.trial = row, mode, case, device, trial
        self.probe = _probe_of(trial)
        self.limits = {(m.quantity, m.step, m.layer): m for verdict in trial.verdicts for m in verdict.measurements}
        self.problems = tuple(problem for verdict in trial.verdicts for problem in verdict.problems)
        self.off = max((float(m.ratio.max()) for m in self.limits.values() if m.quantity != "lse" and m.error.numel()), default=0.0)
        """How many limits the failing row is away from the right result; the LSE apart, which faults are not compared by."""
        self.worlds: dict[Conventions, tuple[World, list[Tensor]]] = {}

    def fits(self, candidates: Sequence[Fault]) -> list[Fit]:
        """Every candidate's distance. In graph modes a run of the same batches without a graph rules out most: capturing is what costs."""
        if not self.mode.uses_graph:
            return [self.fit(fault, RUNNERS[self.mode]) for fault in candidates]
        runner = run_eager if self.mode.pads_tokens else run_padded
        eager = [self.fit(fault, runner) for fault in candidates if any(not mode.uses_graph for mode in fault.modes)]
        ruled_out = {fit.fault.id: fit for fit in eager if fit.ratio > 1}
        return [ruled_out.get(fault.id) or self.fit(fault, RUNNERS[self.mode]) for fault in candidates]

    def fit(self, fault: Fault, runner: Runner) -> Fit:
        """Run one fault until it is done or a result is too far away."""
        rounded = self.rounded(fault, runner)
        world = self.world(fault)
        worst = [(0.0, 0.0)]

        def compare(quantity: str, step: int, layer: int, found: Tensor, mine: Tensor) -> None:
            measured = self.limits.get((quantity, step, layer))
            if measured is not None:
                limit = measured.limit
                if quantity == "out" and (step, layer) in rounded:
                    own = relative_rms(rounded[step, layer], found).flatten().to(limit.device)
                    limit = torch.maximum(limit, limits(own, torch.zeros_like(own)))
                worst.append(_distance(found, mine, limit))
                if worst[-1][0] > 1:
                    raise _Differs

        def seen(step: int, layer: int, out: Tensor) -> None:
            compare("out", step, layer, out, self.trial.outputs[step][layer])

        backend = ForcedBackend(world, fault.subject(world.context), self.trial.outputs, seen)
        try:
            for run in runner(world, backend):
                backend.collect()
                for layer, states in enumerate(self.trial.states[run.index] if self.trial.states else ()):
                    compare("out", run.index, layer, backend.found[run.index, layer], self.trial.outputs[run.index][layer])
                    for name, found in produced_states(world, run.index, layer).items():
                        compare(name, run.index, layer, found, states[name])
        except _Differs:
            pass
        except Exception:  # noqa: BLE001 - a fault that cannot run on another row's results explains nothing
            worst.append((float("inf"), float("inf")))
        return Fit(fault, max(ratio for ratio, _ in worst), max(error for _, error in worst))

    def rounded(self, fault: Fault, runner: Runner) -> dict[tuple[int, int], Tensor]:
        """A fault's outputs by step and layer when its factors are cut to TF32, where the row says that its products are. The limits hold
        what that does to the right result; to the fault's, which sees other keys, it may do more."""
        if self.case.dtype != "fp32" or TF32_PRODUCTS not in self.row.conventions.rounding_of(self.case, self.device.type):
            return {}
        world = self.world(fault)
        for tensor in _pools(world):
            tensor.copy_(_tf32(tensor))
        backend = ForcedBackend(world, _factors_cut(fault.subject(world.context)), self.trial.outputs, lambda step, layer, out: None)
        try:
            for _ in runner(world, backend):
                backend.collect()
        except Exception:  # noqa: BLE001 - it raises without the cut too, which decides
            return {}
        return backend.found

    def conventions(self, fault: Fault) -> Conventions:
        """Pools laid out, and filled, as for the failing row; the rest as the faulty subject wants it."""
        own = self.row.conventions
        return replace(
            fault.conventions,
            kv_layout=own.kv_layout,
            state_layout=own.state_layout,
            tail_may_hold_nan=own.tail_may_hold_nan,
            unreferenced_may_hold_nan=own.unreferenced_may_hold_nan,
            rounding=own.rounding,
        )

    def world(self, fault: Fault) -> World:
        """The world of the failing trial with its pools as they were at the start."""
        conventions = self.conventions(fault)
        if conventions not in self.worlds:
            fresh = World(self.case, self.mode, self.probe, conventions, self.device)
            self.worlds[conventions] = fresh, [tensor.clone() for tensor in _memory(fresh)]
        world, before = self.worlds[conventions]
        for tensor, kept in zip(_memory(world), before, strict=True):
            tensor.copy_(kept)
        world.entered = -1
        return world

    def fails(self, fault: Fault) -> bool:
        """Whether the judgement rejects the fault here, and for the same reason: a fault whose results are within the limits of the
        reference, however wrong its metadata or its writes are, does not explain a result that is not."""
        theirs = self._faulty_trial(fault)
        mine = wrong_quantities(self.trial)
        if mine == {"lse"}:
            return self._same_lse(theirs)
        return bool(wrong_quantities(theirs) & mine) if mine else not theirs.passed

    def _same_lse(self, theirs: Trial) -> bool:
        """Whether a fault's LSE is off by what the failing row's is off by; outputs do not tell an LSE from another."""
        found = {(m.quantity, m.step, m.layer): m for verdict in theirs.verdicts for m in verdict.measurements if m.quantity == "lse"}
        mine = {key: measured for key, measured in self.limits.items() if measured.quantity == "lse"}
        return found.keys() == mine.keys() and all(
            bool(((found[key].error - measured.error).abs() <= SLACK * measured.limit).all()) for key, measured in mine.items()
        )

    def _faulty_trial(self, fault: Fault) -> Trial:
        return _faulty_trial(fault, self.conventions(fault), self.mode, self.case, self.device, self.probe)

    def same_guards(self, fault: Fault) -> int:
        """0: the guards say the same of both, 1: the same kinds of things, 2: something else."""
        theirs = [problem for verdict in self._faulty_trial(fault).verdicts for problem in verdict.problems]
        if set(theirs) == set(self.problems):
            return 0
        return 1 if set(map(_kind, theirs)) == set(map(_kind, self.problems)) else 2


@lru_cache(maxsize=512)
def _faulty_trial(fault: Fault, conventions: Conventions, mode: RunnerMode, case: Case, device: torch.device, probe: Probe) -> Trial:
    """The faulty subject's own trial, without its outputs."""
    trial = run_trial(replace(fault.row(), conventions=conventions), mode, case, device, probe)
    return replace(trial, outputs=(), states=())


def _probe_of(trial: Trial) -> Probe:
    """The probe of a trial, with the taking over that its batches had."""
    known = next(probe for probe in PROBES if probe.name == trial.probe)
    taken = [step.follows for step in trial.plan.steps if step.recycles]
    return replace(known, recycled=taken[-1] if taken else "")


def wrong_quantities(trial: Trial) -> frozenset[str]:
    """``out``, ``lse``, ``state``, ``intermediate``: those with a row over its limit."""
    measured = [m for verdict in trial.verdicts for m in verdict.measurements]
    return frozenset(m.quantity for m in measured if m.error.numel() and float(m.ratio.max()) > 1)


def _memory(world: World) -> Iterator[Tensor]:
    """The table and the pools, which change from step to step."""
    yield world.req_to_token
    yield from _pools(world)


def _pools(world: World) -> Iterator[Tensor]:
    for pool in (world.context.kv, world.context.states):
        for fenced in pool.fenced if pool is not None else ():
            yield fenced.tensor


def _factors_cut(subject: AttentionBackend) -> AttentionBackend:
    """The backend with its queries, keys and values cut to TF32."""
    exact = subject.forward

    def forward(q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return exact(_tf32(q), _tf32(k), _tf32(v), layer_id, batch)

    subject.forward = forward  # type: ignore[method-assign]
    return subject


def _tf32(tensor: Tensor) -> Tensor:
    """A float32 tensor cut to TF32 that keeps its strides."""
    cut = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return cut.copy_(tf32(tensor))


def _distance(found: Tensor, mine: Tensor, limit: Tensor) -> tuple[float, float]:
    """Largest row-relative distance, as a ratio of the row's ``limit`` and itself. Rows that are finite in neither are alike.

    The limits know the right answer, not the fault's: a row smaller than the median is measured against the median, since a fault's
    may nearly cancel where the right one does not, and a limit is no less than one rounding (a quarter of a unit, rms) allows, since
    the right answer may be a single value, which rounds to itself.
    """
    found, mine = found.to(limit.device), mine.to(limit.device)
    finite = found.isfinite().all(dim=-1).flatten()
    if not finite.numel():
        return 0.0, 0.0
    error = relative_rms(mine, found).flatten()
    size = found.double().square().mean(dim=-1).sqrt().flatten()
    floor = size[finite].median() if bool(finite.any()) else size.new_zeros(())
    error = torch.where(finite & (size > 0) & (size < floor), error * size / floor, error)
    error = torch.where(~finite & ~mine.isfinite().all(dim=-1).flatten(), 0.0, error)
    limit = limit.clamp(min=FACTOR * torch.finfo(found.dtype).eps / 4)
    ratio = torch.where(error == 0, 0.0, error / (SLACK * limit))
    return float(ratio.max()), float(error.max())


def _kind(problem: str) -> str:
    """A guard's line without the numbers and places in it."""
    return re.sub(r"\d+", "#", re.sub(r"\(.*\)", "", problem))
