"""Diagnosis: which planted fault, put into a working row, produces what a failing row produced.

It sees the case and the failing trial's results only. Each applicable fault is run in the same world and mode; layers after the first
get the failing row's own inputs, so that one rounding more or less does not grow from layer to layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.faults.fault import Fault, faults
from attnmatrix.harness.forced import ForcedBackend, run_padded
from attnmatrix.harness.measure import Measurement, relative_rms
from attnmatrix.harness.probes import PROBES
from attnmatrix.harness.produced import produced_states
from attnmatrix.harness.registry import Row
from attnmatrix.harness.runners import RUNNERS, Runner
from attnmatrix.harness.runners.eager import run_eager
from attnmatrix.harness.scratch import OutOfBoundsWrite
from attnmatrix.harness.trial import Trial, run_trial
from attnmatrix.harness.world import World

SLACK = 2.0
"""Two results that are each within their limit of one value are within twice that limit of each other."""
ALIKE = 0.1
"""Faults whose distances from the failing row differ by less than this share of the limit are not told apart."""
LARGEST = 60_000_000
"""Work (see ``_work``) above which a case is not diagnosed: about 5 s on one core."""
UNEXPLAINED = "unexplained"
OUT_OF_BOUNDS = "no diagnosis: a write out of bounds ended the run"
TOO_LARGE = "no diagnosis: the case is too large to try every fault on it"


@dataclass(frozen=True)
class Diagnosis:
    """``faults`` that the case cannot tell apart and whose results equal the failing row's, ``error`` apart at most; none: ``why``.

    ``subject`` is what they explain (output, state, intermediate state or write); ``nearest`` is the closest of the other faults,
    ``distance`` limits away.
    """

    faults: tuple[Fault, ...] = ()
    error: float = 0.0
    subject: str = "output"
    nearest: Fault | None = None
    distance: float = float("inf")
    why: str = ""

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(fault.id for fault in self.faults)

    @property
    def skipped(self) -> bool:
        """Whether there was nothing to compare: the case is too large, or a write out of bounds ended the run."""
        return self.why in (TOO_LARGE, OUT_OF_BOUNDS)

    def confirms(self, declared: str) -> bool:
        """Whether a declared diagnosis, a fault's id or sentence or ``unexplained``, is what was found."""
        if not self.faults:
            return declared == UNEXPLAINED and self.why.startswith(UNEXPLAINED)
        return any(declared in (fault.id, fault.diagnosis) for fault in self.faults)

    def __str__(self) -> str:
        if not self.faults:
            return self.why + self._other()
        named = " or ".join(f"{fault.diagnosis} ({fault.id})" for fault in self.faults[:3])
        more = f" or {', '.join(self.ids[3:])}" if self.ids[3:] else ""
        return f"{self.subject} equals the reference with {named}{more}, error {self.error:.2g}{self._other()}"

    def _other(self) -> str:
        if self.nearest is None:
            return ""
        return f"; nearest other: {self.nearest.diagnosis} ({self.nearest.id}), {self.distance:.3g} limits away"


@dataclass(frozen=True)
class _Fit:
    """How close a fault comes to the failing row: ``ratio`` of the largest distance to its limit, ``error`` that distance itself;
    ``guards`` 0: the same guard problems, 1: of the same kinds, 2: others."""

    fault: Fault
    ratio: float
    error: float
    guards: int = 2


class _Differs(Exception):
    """Raised out of a run as soon as a result lies too far from the failing row's."""


def diagnose(row: Row, mode: RunnerMode, case: Case, device: torch.device, trial: Trial) -> Diagnosis:
    """What explains a failing ``trial``. The faults tried are those of the row's kind that apply to the case in this mode."""
    if isinstance(trial.error, OutOfBoundsWrite):
        return Diagnosis(why=OUT_OF_BOUNDS)
    if trial.error is not None or not trial.outputs:
        return Diagnosis(why="no diagnosis: the run ended in an exception")
    if any(len(outputs) != len(trial.outputs[0]) for outputs in trial.outputs):
        return Diagnosis(why="no diagnosis: attention did not run once for each layer")
    if _work(case, mode) > LARGEST:
        return Diagnosis(why=TOO_LARGE)
    candidates = [fault for fault in faults() if fault.attention is row.kind and fault.applies(case, mode)]
    search = _Search(row, mode, case, device, trial)
    fits = search.fits(candidates)
    close = [replace(fit, guards=search.same_guards(fit.fault)) for fit in fits if fit.ratio <= 1 and search.fails(fit.fault)]
    wrong = _wrong(trial)
    close = [fit for fit in close if wrong or fit.guards < 2]
    best = min((fit.guards for fit in close), default=2)
    close = sorted((fit for fit in close if fit.guards == best), key=lambda fit: (fit.ratio, fit.fault.id))
    told = [fit for fit in close if fit.ratio <= close[0].ratio + ALIKE]
    others = sorted((fit for fit in fits if fit.fault not in [f.fault for f in told]), key=lambda fit: fit.ratio)
    nearest = next((fit for fit in others if 0 < fit.ratio < float("inf")), None)
    other = {"nearest": nearest.fault if nearest else None, "distance": nearest.ratio * SLACK if nearest else float("inf")}
    if not told:
        return Diagnosis(why=f"{UNEXPLAINED}: none of {len(candidates)} faults produces the same", **other)  # type: ignore[arg-type]
    subject = next((name for name in ("output", "state", "intermediate state") if name in wrong), "write")
    return Diagnosis(tuple(fit.fault for fit in told), max(fit.error for fit in told), subject, **other)  # type: ignore[arg-type]


def _work(case: Case, mode: RunnerMode) -> int:
    """Multiplications of the cell's batches, and a constant for each batch."""
    batches = schedule(case, mode).batches
    linear = case.kind is not AttentionKind.SOFTMAX
    lengths = [(batch, case.heads.dim if linear else max([1, *batch.kv_lens])) for batch in batches]
    work = sum(batch.batch_size * max([1, *batch.new_lens]) * length * batch.heads.q * batch.heads.dim for batch, length in lengths)
    return work + len(batches) * 500_000


def _wrong(trial: Trial) -> set[str]:
    """Names of the quantities with a row over its limit."""
    names = {"out": "output", "intermediate": "intermediate state"}
    measured = [m for verdict in trial.verdicts for m in verdict.measurements]
    return {names.get(m.quantity, m.quantity) for m in measured if m.error.numel() and float(m.ratio.max()) > 1}


class _Search:
    """One failing trial and the worlds in which faults are run against it."""

    def __init__(self, row: Row, mode: RunnerMode, case: Case, device: torch.device, trial: Trial) -> None:
        self.row, self.mode, self.case, self.device, self.trial = row, mode, case, device, trial
        self.probe = next(probe for probe in PROBES if probe.name == trial.probe)
        self.limits = {(m.quantity, m.step, m.layer): m for verdict in trial.verdicts for m in verdict.measurements}
        self.problems = tuple(problem for verdict in trial.verdicts for problem in verdict.problems)
        self.worlds: dict[Conventions, tuple[World, list[Tensor]]] = {}

    def fits(self, candidates: Sequence[Fault]) -> list[_Fit]:
        """Every candidate's distance. In graph modes a run of the same batches without a graph rules out most: capturing is what costs."""
        if not self.mode.uses_graph:
            return [self.fit(fault, RUNNERS[self.mode]) for fault in candidates]
        runner = run_eager if self.mode.pads_tokens else run_padded
        eager = [self.fit(fault, runner) for fault in candidates if any(not mode.uses_graph for mode in fault.modes)]
        ruled_out = {fit.fault.id: fit for fit in eager if fit.ratio > 1}
        return [ruled_out.get(fault.id) or self.fit(fault, RUNNERS[self.mode]) for fault in candidates]

    def fit(self, fault: Fault, runner: Runner) -> _Fit:
        """Run one fault until it is done or a result is too far away."""
        world = self.world(fault)
        worst = [(0.0, 0.0)]

        def compare(quantity: str, step: int, layer: int, found: Tensor, mine: Tensor) -> None:
            measured = self.limits.get((quantity, step, layer))
            if measured is not None:
                worst.append(_distance(found, mine, measured))
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
        return _Fit(fault, max(ratio for ratio, _ in worst), max(error for _, error in worst))

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
            self.worlds[conventions] = fresh, [tensor.clone() for tensor in _pools(fresh)]
        world, before = self.worlds[conventions]
        for tensor, kept in zip(_pools(world), before, strict=True):
            tensor.copy_(kept)
        return world

    def fails(self, fault: Fault) -> bool:
        """Whether the judgement rejects the fault here: one that is within the limits of the reference explains nothing."""
        return not _faulty_trial(fault, self.conventions(fault), self.mode, self.case, self.device, self.trial.probe)[0]

    def same_guards(self, fault: Fault) -> int:
        """0: the guards say the same of both, 1: the same kinds of things, 2: something else."""
        theirs = _faulty_trial(fault, self.conventions(fault), self.mode, self.case, self.device, self.trial.probe)[1]
        if set(theirs) == set(self.problems):
            return 0
        return 1 if set(map(_kind, theirs)) == set(map(_kind, self.problems)) else 2


@lru_cache(maxsize=512)
def _faulty_trial(
    fault: Fault, conventions: Conventions, mode: RunnerMode, case: Case, device: torch.device, probe: str
) -> tuple[bool, tuple[str, ...]]:
    """Whether the faulty subject passes, and what the guards say of it."""
    given = next(known for known in PROBES if known.name == probe)
    trial = run_trial(replace(fault.row(), conventions=conventions), mode, case, device, given)
    return trial.passed, tuple(problem for verdict in trial.verdicts for problem in verdict.problems)


def _pools(world: World) -> Iterator[Tensor]:
    for pool in (world.context.kv, world.context.states):
        for fenced in pool.fenced if pool is not None else ():
            yield fenced.tensor


def _distance(found: Tensor, mine: Tensor, measured: Measurement) -> tuple[float, float]:
    """Largest row-relative distance, as a ratio of the row's limit and itself. Rows that are finite in neither are alike.

    A row smaller than the median is measured against the median: the limits know where the right answer nearly cancels, not where a
    fault's does.
    """
    finite = found.isfinite().all(dim=-1).flatten()
    if not finite.numel():
        return 0.0, 0.0
    error = relative_rms(mine, found).flatten()
    size = found.double().square().mean(dim=-1).sqrt().flatten()
    floor = size[finite].median() if bool(finite.any()) else size.new_zeros(())
    error = torch.where(finite & (size > 0) & (size < floor), error * size / floor, error)
    error = torch.where(~finite & ~mine.isfinite().all(dim=-1).flatten(), 0.0, error)
    ratio = torch.where(error == 0, 0.0, error / (SLACK * measured.limit))
    return float(ratio.max()), float(error.max())


def _kind(problem: str) -> str:
    """A guard's line without the numbers and places in it."""
    return re.sub(r"\d+", "#", re.sub(r"\(.*\)", "", problem))
