"""One cell: a row, a runner mode and a case, run under every probe, held against its claim and against its controls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.harness.capabilities import NotApplicable, Supported
from attnmatrix.harness.controls import Control
from attnmatrix.harness.coverage import share_of
from attnmatrix.harness.diagnose import diagnose
from attnmatrix.harness.locate import locate_worst
from attnmatrix.harness.outcome import Outcome, judge_claim, judge_diagnosis, judge_not_applicable
from attnmatrix.harness.pools import bits
from attnmatrix.harness.probes import PEAKED, PLAIN, Probe
from attnmatrix.harness.properties import PropertyResult, examine
from attnmatrix.harness.registry import Row
from attnmatrix.harness.trial import Trial, run_trial


@dataclass(frozen=True)
class ControlCount:
    """Negative controls of one kind: how many were tried and rejected; ``raised`` ended in an exception and count as neither."""

    rejected: int = 0
    tried: int = 0
    raised: int = 0


@dataclass(frozen=True)
class CellResult:
    """Outcome of a cell. ``status`` is a case status of the matrix; ``reason`` says why it is not ``pass``, ``diagnosis`` which fault
    explains a failure and ``where`` where it is worst."""

    row: str
    mode: RunnerMode
    case: Case
    status: str
    reason: str
    trials: tuple[Trial, ...] = ()
    diagnosis: str = ""
    seconds: float = 0.0
    details: tuple[str, ...] = ()
    controls: dict[str, ControlCount] = field(default_factory=dict)
    properties: tuple[PropertyResult, ...] = ()
    where: str = ""


def run_cell(
    row: Row,
    mode: RunnerMode,
    case: Case,
    device: torch.device,
    controls: Sequence[Control] | None = None,
    full: bool = True,
    diagnosed: bool = True,
) -> CellResult:
    """Drive one row through one mode on one case.

    ``full`` False samples interpreted rows (see ``coverage``); ``controls`` None takes the case's share of its cell's controls; without
    ``diagnosed`` a failure is not explained and a known fault is taken at its word.
    """
    begin = time.perf_counter()
    share = share_of(row, mode, case, device.type, full)
    claim = row.capabilities.claim(mode, case, device.type)
    trials: tuple[Trial, ...] = ()
    counts: dict[str, ControlCount] = {}
    properties: tuple[PropertyResult, ...] = ()
    diagnosis = where = ""
    if isinstance(claim, NotApplicable):
        outcome = judge_not_applicable(claim)
    else:
        plain = isinstance(claim, Supported)
        trials = _trials(row, mode, case, device, share.probes if plain else (PEAKED,))  # needle inputs hide wrong weights
        differences = _differences(trials) if plain and row.capabilities.deterministic else ()
        known = row.capabilities.known_fault(mode, case)
        outcome = judge_claim(row, claim, known, trials, differences)
        if diagnosed and outcome.status in ("fail", "known") and not trials[-1].passed:
            found = diagnose(row, mode, case, device, trials[-1])
            where = str(locate_worst([m for verdict in trials[-1].verdicts for m in verdict.measurements], trials[-1].plan) or "")
            diagnosis = str(found) if trials[-1].error is None else ""
            outcome = judge_diagnosis(outcome, known, found)
        if outcome.status == "pass":
            outcome, counts = _try_controls(row, mode, case, device, share.controls if controls is None else controls)
        if outcome.status == "pass" and share.properties:
            properties = examine(row, case, device)
            broken = [result.name for result in properties if result.broken_promise]
            if broken:
                outcome = Outcome("fail", f"promised, but not kept: {', '.join(broken)}")
    seconds = time.perf_counter() - begin
    return CellResult(
        row.name, mode, case, outcome.status, outcome.reason, trials, diagnosis, seconds, outcome.details, counts, properties, where
    )


def _trials(row: Row, mode: RunnerMode, case: Case, device: torch.device, probes: Sequence[Probe]) -> tuple[Trial, ...]:
    """One trial per probe, ended by the first that does not pass."""
    trials: list[Trial] = []
    for probe in probes:
        trials.append(run_trial(row, mode, case, device, probe))
        if not trials[-1].passed:
            break
    return tuple(trials)


def _differences(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Where outputs under two fills of the dead slots differ, though the live inputs were equal to the bit."""
    by_name = {trial.probe: trial for trial in trials if trial.passed}
    if "peaked" not in by_name or "poison" not in by_name:
        return ()
    for step, (first, second) in enumerate(zip(by_name["peaked"].outputs, by_name["poison"].outputs, strict=True)):
        for layer, (a, b) in enumerate(zip(first, second, strict=True)):
            changed = (bits(a.contiguous()) != bits(b.contiguous())).flatten(1).any(dim=-1)
            if bool(changed.any()):
                tokens = changed.nonzero().flatten().tolist()
                return (f"step {step}, layer {layer}: what lies in dead slots changes the output of tokens {tokens[:8]}",)
    return ()


def _try_controls(
    row: Row, mode: RunnerMode, case: Case, device: torch.device, controls: Sequence[Control]
) -> tuple[Outcome, dict[str, ControlCount]]:
    """Tamper with what the backend is given: the same comparison must reject each control, else it proves nothing.

    Nearly every control is rejected on the case's own batch; the rest of the schedule is run for those that are not.
    """
    counts: dict[str, ControlCount] = {}
    accepted: list[str] = []
    for control in controls:
        trial = run_trial(row, mode, case, device, PLAIN, control, schedule(case, mode).first())
        if trial.passed:
            trial = run_trial(row, mode, case, device, PLAIN, control)
        seen = counts.get(control.kind, ControlCount())
        if trial.error is not None:
            counts[control.kind] = ControlCount(seen.rejected, seen.tried, seen.raised + 1)
            continue
        counts[control.kind] = ControlCount(seen.rejected + (not trial.passed), seen.tried + 1, seen.raised)
        if trial.passed:
            accepted.append(control.title)
    if accepted:
        return Outcome("vacuous", f"accepted with {'; '.join(accepted)}", tuple(accepted)), counts
    return Outcome("pass"), counts
