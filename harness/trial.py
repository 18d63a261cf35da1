"""One trial: a row run through one mode on one world, each step judged right after it ran."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import Schedule
from attnmatrix.harness.controls import Control, TamperedBackend
from attnmatrix.harness.guards import Guards
from attnmatrix.harness.interpreter import prepare_triton
from attnmatrix.harness.metadata_checks import InspectedBackend
from attnmatrix.harness.probes import Probe
from attnmatrix.harness.produced import produced_states
from attnmatrix.harness.registry import Row
from attnmatrix.harness.runners import RUNNERS
from attnmatrix.harness.runners.recorder import ContractError
from attnmatrix.harness.verdict import StepVerdict, judge_step
from attnmatrix.harness.world import World


@dataclass(frozen=True)
class Trial:
    """What one probe showed: per-step verdicts, or the exception that ended it.

    ``outputs`` are the attention outputs of each step and layer, for comparisons between trials; ``states``, kept of a failing trial of
    a linear kind, what each left for the batch's own requests (see ``produced_states``). ``untouched``: no pool was changed by a run
    that ended in an exception. ``plan`` holds the batches that were to be run.
    """

    probe: str
    verdicts: tuple[StepVerdict, ...]
    outputs: tuple[tuple[Tensor, ...], ...] = ()
    replays: int = 0
    graph: str = "none"
    error: BaseException | None = None
    untouched: bool = True
    states: tuple[tuple[dict[str, Tensor], ...], ...] = ()
    plan: Schedule = field(default_factory=lambda: Schedule((), ()))

    @property
    def passed(self) -> bool:
        return self.error is None and all(verdict.passed for verdict in self.verdicts)

    @property
    def margin(self) -> float | None:
        """Largest error/limit ratio, None when nothing was judged."""
        return max((verdict.margin for verdict in self.verdicts), default=None)


def run_trial(
    row: Row,
    mode: RunnerMode,
    case: Case,
    device: torch.device,
    probe: Probe,
    control: Control | None = None,
    plan: Schedule | None = None,
) -> Trial:
    """Build the world, run every step of the schedule (``plan`` in place of the mode's own), judge each.

    A control tampers with what the backend is given.
    """
    prepare_triton(device, row.interpreted)
    world = World(case, mode, probe, row.conventions, device, plan)
    guards = Guards(world)
    verdicts: list[StepVerdict] = []
    outputs: list[tuple[Tensor, ...]] = []
    states: list[tuple[dict[str, Tensor], ...]] = []
    replays, graph = 0, "none"
    try:
        backend = InspectedBackend(TamperedBackend(row, world, control) if control else row.create(world.context))
        for run in RUNNERS[mode](world, backend):
            run.problems += backend.take_problems()
            verdicts.append(judge_step(world, run, guards))
            outputs.append(tuple(call.out.clone() for call in run.calls))
            states.append(tuple(produced_states(world, run.index, call.layer) for call in run.calls))
            replays += run.replays
            graph = run.graph
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is an outcome, classified by the caller
        return Trial(probe.name, tuple(verdicts), tuple(outputs), replays, graph, error, not guards.untouched(), plan=world.schedule)
    missing = len(world.steps) - len(verdicts)
    short = ContractError(f"{missing} of {len(world.steps)} batches were not run") if missing else None
    failed = bool(missing) or not all(verdict.passed for verdict in verdicts)
    return Trial(
        probe.name, tuple(verdicts), tuple(outputs), replays, graph, short, states=tuple(states) if failed else (), plan=world.schedule
    )


def describe(trial: Trial) -> tuple[str, ...]:
    """One line for each thing that went wrong, the worst first."""
    lines: list[str] = []
    if trial.error is not None:
        last = traceback.extract_tb(trial.error.__traceback__)[-1:]
        at = f" at {last[0].filename.rsplit('/', 1)[-1]}:{last[0].lineno}" if last else ""
        lines.append(f"{type(trial.error).__name__}{at}: {trial.error}")
    return (*lines, *describe_verdicts(trial.verdicts, trial.probe))


def describe_verdicts(verdicts: Sequence[StepVerdict], probe: str) -> tuple[str, ...]:
    """One line for each measurement over its limit, the worst first, then the problems."""
    lines: list[str] = []
    wrong = [m for verdict in verdicts for m in verdict.measurements if m.error.numel() and float(m.ratio.max()) > 1]
    for m in sorted(wrong, key=lambda m: -float(m.ratio.max())):
        row, bad = m.worst, int((m.ratio > 1).sum())
        lines.append(
            f"{m.quantity} of layer {m.layer}, step {m.step}: error {float(m.error[row]):.3g}, limit {float(m.limit[row]):.3g} at "
            f"{m.where(row)}; {bad} of {m.error.numel()} rows over their limit ({probe} inputs)"
        )
    lines += [f"{problem} ({probe} inputs)" for verdict in verdicts for problem in verdict.problems]
    return tuple(lines)
