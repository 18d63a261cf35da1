"""False alarms: right rows on random cases, far beyond the suites, must pass every one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, islice
from time import perf_counter

import msgspec
import torch

from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.pairwise import work
from attnmatrix.cases.sampling import random_cases
from attnmatrix.harness.adapted_modes import ADAPTED_MODES
from attnmatrix.harness.capabilities import Supported
from attnmatrix.harness.probes import PROBES
from attnmatrix.harness.registry import Row, find_row, rows
from attnmatrix.harness.row_suite import is_sampled
from attnmatrix.harness.trial import describe, run_trial
from attnmatrix.matrix.workers import worker_pool

CPU = torch.device("cpu")
SLOW_SHARE, SLOW_WORK = 10, 500_000  # one case in ten for a row that crawls on a CPU, and only small ones


class Alarm(msgspec.Struct, frozen=True):
    """A verdict against a right row."""

    row: str
    mode: str
    case: str
    probe: str
    reason: str


class Tally(msgspec.Struct, frozen=True):
    """One row in one mode: trials run, and the one that came closest to its limit (error over limit)."""

    row: str
    kind: str
    mode: str
    trials: int
    margin: float
    case: str


class Healthy(msgspec.Struct, frozen=True):
    """``cases`` random cases, each under one probe; ``alarms`` should be empty."""

    cases: int
    seed: int
    seconds: float
    tallies: list[Tally]
    alarms: list[Alarm]

    @property
    def margin(self) -> float:
        """The worst margin of all."""
        return max((tally.margin for tally in self.tallies), default=0.0)


class Task(msgspec.Struct, frozen=True):
    """One trial, by names that travel between processes."""

    row: str
    kind: str
    mode: str
    case: str
    probe: int


def healthy_tasks(cases: int, seed: int) -> list[Task]:
    """``cases`` trials over every row that runs on a CPU, its modes and probes in turn; cases that a row does not claim, or that a known
    fault of its package is about, are passed over. Reproducible by ``seed``."""
    cells = [(row, mode) for row in rows() if "cpu" in row.devices and not row.missing for mode in RunnerMode if mode in ADAPTED_MODES]
    streams = {cell: _accepted(*cell, seed) for cell in cells}
    tasks: list[Task] = []
    for turn in count():
        for (row, mode), stream in streams.items():
            if is_sampled(row, "cpu", False) and turn % SLOW_SHARE:
                continue
            case = next(stream)
            tasks.append(Task(row.name, row.kind.value, mode.value, case, len(tasks) % len(PROBES)))
            if len(tasks) == cases:
                return tasks
    return tasks


def _accepted(row: Row, mode: RunnerMode, seed: int) -> Iterator[str]:
    slow = is_sampled(row, "cpu", False)
    for batch in count():
        for case in random_cases(row.kind, mode, 1000, 1000 * seed + batch):
            exact = case.but(dtype="fp32") if row.interpreted else case
            claimed = (
                isinstance(row.capabilities.claim(mode, exact, "cpu"), Supported) and row.capabilities.known_fault(mode, exact) is None
            )
            if claimed and (not slow or work(exact) <= SLOW_WORK):
                yield exact.id


def run_healthy(cases: int, seed: int, workers: int, progress: Callable[[str], None]) -> Healthy:
    """Run the trials; ``progress`` gets a line every hundred and for each alarm."""
    tasks = healthy_tasks(cases, seed)
    trials: Counter[tuple[str, str, str]] = Counter()
    worst: dict[tuple[str, str, str], tuple[float, str]] = {}
    alarms: list[Alarm] = []
    seconds = 0.0
    with worker_pool(workers) as pool:
        for number, (task, margin, reason, took) in enumerate(pool.map(_run, tasks, chunksize=4), start=1):
            key = (task.row, task.kind, task.mode)
            trials[key] += 1
            seconds += took
            if key not in worst or worst[key][0] < margin:
                worst[key] = (margin, task.case)
            if reason:
                alarms.append(Alarm(task.row, task.mode, task.case, PROBES[task.probe].name, reason))
                progress(f"ALARM {task.row} {task.mode} {task.case}: {reason}")
            if not number % 100:
                progress(f"{number}/{len(tasks)}, worst margin {max(m for m, _ in worst.values()):.2f}, {len(alarms)} alarms")
    tallies = [Tally(*key, trials[key], round(worst[key][0], 4), worst[key][1]) for key in sorted(trials)]
    return Healthy(len(tasks), seed, round(seconds, 1), tallies, alarms)


def _run(task: Task) -> tuple[Task, float, str, float]:
    """The trial's margin, the first thing wrong ('' when it passed), and its seconds."""
    begin = perf_counter()
    case = parse_case(task.case)
    trial = run_trial(find_row(task.row, case.kind), RunnerMode(task.mode), case, CPU, PROBES[task.probe])
    reason = "" if trial.passed else next(islice(describe(trial), 1), "failed")
    return task, trial.margin or 0.0, reason, perf_counter() - begin


def report(found: Healthy) -> str:
    """The outcome as text: a line for each row and mode, the alarms, the sum."""
    from tabulate import tabulate

    body = [[t.row, t.kind, t.mode, t.trials, f"{t.margin:.2f}", t.case] for t in found.tallies]
    lines = [tabulate(body, headers=["row", "kind", "mode", "cases", "worst margin", "on"]), ""]
    lines += [f"ALARM {a.row} {a.mode} {a.case} ({a.probe}): {a.reason}" for a in found.alarms]
    lines.append(f"{found.cases} healthy cases, {len(found.alarms)} failing verdicts, worst margin {found.margin:.2f}")
    return "\n".join(lines)
