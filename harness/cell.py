"""One cell: a row, a runner mode and a case, run and judged."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field

import torch
from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.capabilities import Blocked, Claim, Deferred, KnownFault, NotApplicable, Supported
from attnmatrix.harness.guards import Guards
from attnmatrix.harness.interpreter import prepare_triton
from attnmatrix.harness.probes import PEAKED, Probe
from attnmatrix.harness.refusal import why_not_a_refusal
from attnmatrix.harness.registry import Row
from attnmatrix.harness.runners import RUNNERS
from attnmatrix.harness.runners.recorder import ContractError
from attnmatrix.harness.verdict import StepVerdict, judge_step
from attnmatrix.harness.world import World


@dataclass(frozen=True)
class ProbeResult:
    """What one probe showed: per-step verdicts, or the exception that ended it."""

    probe: str
    verdicts: tuple[StepVerdict, ...]
    replays: int = 0
    graph: str = "none"
    error: BaseException | None = None
    untouched: bool = True

    @property
    def passed(self) -> bool:
        return self.error is None and all(verdict.passed for verdict in self.verdicts)


@dataclass(frozen=True)
class CellResult:
    """Outcome of a cell. ``status`` is a case status of the matrix; ``reason`` says why it is not ``pass``."""

    row: str
    mode: RunnerMode
    case: Case
    status: str
    reason: str
    probes: tuple[ProbeResult, ...] = ()
    diagnosis: str = ""
    seconds: float = 0.0
    details: tuple[str, ...] = field(default=())


def run_cell(row: Row, mode: RunnerMode, case: Case, device: torch.device) -> CellResult:
    """Drive one row through one mode on one case and hold the outcome against the row's claim."""
    begin = time.perf_counter()
    claim = row.capabilities.claim(mode, case, device.type)
    if isinstance(claim, NotApplicable):
        holds = claim.check()
        status, reason = ("n/a", claim.reason) if holds else ("fail", f"declared n/a ({claim.reason}), but the check does not find it so")
        return CellResult(row.name, mode, case, status, reason, seconds=time.perf_counter() - begin)
    result = run_probe(row, mode, case, device, PEAKED)
    known = row.capabilities.known_fault(mode, case)
    status, reason, details = _outcome(row, claim, known, result)
    return CellResult(row.name, mode, case, status, reason, (result,), "", time.perf_counter() - begin, details)


def run_probe(row: Row, mode: RunnerMode, case: Case, device: torch.device, probe: Probe) -> ProbeResult:
    """Build the world, run every step of the schedule and judge each right after it ran."""
    prepare_triton(device, row.interpreted)
    world = World(case, mode, probe, row.conventions, device)
    guards = Guards(world)
    verdicts: list[StepVerdict] = []
    replays, graph = 0, "none"
    try:
        backend = row.create(world.context)
        for run in RUNNERS[mode](world, backend):
            verdicts.append(judge_step(world, run, guards))
            replays, graph = replays + run.replays, run.graph
    except Exception as error:
        return ProbeResult(probe.name, tuple(verdicts), replays, graph, error=error, untouched=not guards.untouched())
    if len(verdicts) != len(world.steps):
        short = ContractError(f"{len(verdicts)} of {len(world.steps)} batches were run")
        return ProbeResult(probe.name, tuple(verdicts), replays, graph, error=short)
    return ProbeResult(probe.name, tuple(verdicts), replays, graph)


def _outcome(row: Row, claim: Claim, known: KnownFault | None, result: ProbeResult) -> tuple[str, str, tuple[str, ...]]:
    found = describe(result)
    if isinstance(claim, Blocked):
        if result.error is not None:
            problem = why_not_a_refusal(result.error, claim, row)
            if problem is None and result.untouched:
                return "blocked", f"{claim.reason} ({type(result.error).__name__} seen)", ()
            return "fail", f"declared blocked ({claim.reason}), but {problem or 'a pool was written before the refusal'}", found
        if result.passed:
            return "fail", f"declared blocked ({claim.reason}), but the package computes it right: the limit is over-claimed", ()
        return "fail", f"declared blocked ({claim.reason}), but the package computes it wrong without refusing", found
    if isinstance(claim, Deferred):
        if result.passed:
            return "fail", f"declared deferred ({claim.reason}), but it passes", ()
        return "deferred", f"{claim.reason} ({claim.issue})", found
    assert isinstance(claim, Supported)
    if known is not None:
        if result.passed:
            return "fail", f"declared a known fault ({known.reason}), but it passes", ()
        return "known", f"{known.reason} (see {known.finding})", found
    return ("pass", "", ()) if result.passed else ("fail", found[0] if found else "failed", found)


def describe(result: ProbeResult) -> tuple[str, ...]:
    """One line for each thing that went wrong in a probe, the worst first."""
    lines: list[str] = []
    if result.error is not None:
        last = traceback.extract_tb(result.error.__traceback__)[-1:]
        at = f" at {last[0].filename.rsplit('/', 1)[-1]}:{last[0].lineno}" if last else ""
        lines.append(f"{type(result.error).__name__}{at}: {result.error}")
    for verdict in result.verdicts:
        for m in sorted(verdict.measurements, key=lambda m: -float(m.ratio.max()) if m.error.numel() else 0.0):
            if m.error.numel() and float(m.ratio.max()) > 1:
                row = m.worst
                bad = int((m.ratio > 1).sum())
                lines.append(
                    f"{m.quantity} of layer {m.layer}, step {m.step}: error {float(m.error[row]):.3g}, limit {float(m.limit[row]):.3g} at "
                    f"{m.where(row)}; {bad} of {m.error.numel()} rows over their limit"
                )
        lines += verdict.problems
    return tuple(lines)
