"""The kill score: every planted fault driven through the suite until a judgement rejects it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache

import torch

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.cases.suites import suite
from attnmatrix.harness.adapted_modes import ADAPTED_MODES
from attnmatrix.harness.cell import CellResult, run_cell
from attnmatrix.harness.faults.fault import Fault, faults
from attnmatrix.harness.faults.fixed_rule import fixed_cases, fixed_rule_rejects
from attnmatrix.harness.registry import Row, UsageError

RULES = ("ours", "fixed")
KILLED, SURVIVED, CRASHED, NO_CASE = "killed", "survived", "crashed", "no applicable case"


@dataclass(frozen=True)
class FaultScore:
    """What became of one fault under one rule.

    ``outcome`` is ``killed``, ``survived``, ``crashed`` (it was never rejected, and some case ended in an exception) or ``no applicable
    case`` (under the rule ``ours`` an error of the fault's definition). ``tried`` cases took ``seconds`` up to the first rejection, by
    ``mode``, ``case`` (an id) and ``probe``; ``reason`` is what the judgement said.
    """

    fault: str
    kind: str
    outcome: str
    tried: int
    seconds: float
    mode: str = ""
    case: str = ""
    probe: str = ""
    reason: str = ""


@dataclass(frozen=True)
class _Sight:
    """What a rule saw on one case."""

    rejected: bool
    raised: bool
    probe: str
    reason: str


def score(rule: str, kinds: Collection[str] = ()) -> list[FaultScore]:
    """Every fault (of some kinds) against ``ours``, the judgement of the matrix, or ``fixed``, a fixed-tolerance suite.

    Raises UsageError for an unknown rule or kind.
    """
    check_rule(rule, kinds)
    return [score_fault(fault, rule) for fault in faults() if not kinds or fault.kind in kinds]


def check_rule(rule: str, kinds: Collection[str]) -> None:
    """Raises UsageError for an unknown rule or kind of fault."""
    if rule not in RULES:
        raise UsageError(f"unknown rule {rule!r}; known: {', '.join(RULES)}")
    known = sorted({fault.kind for fault in faults()})
    for kind in sorted(set(kinds) - set(known)):
        raise UsageError(f"unknown kind of fault {kind!r}; known: {', '.join(known)}")


def score_fault(fault: Fault, rule: str) -> FaultScore:
    """One fault, cheapest case first, until the first rejection."""
    begin = time.perf_counter()
    look: Callable[[Row, RunnerMode, Case], _Sight] = _ours if rule == "ours" else _fixed
    row, tried, raised = fault.row(), 0, ""
    for mode, case in applicable(fault, rule):
        sight = look(row, mode, case)
        tried += 1
        if sight.rejected:
            seconds = time.perf_counter() - begin
            return FaultScore(fault.id, fault.kind, KILLED, tried, seconds, mode.value, case.id, sight.probe, sight.reason)
        raised = raised or (f"{case.id} ({mode.value}): {sight.reason}" if sight.raised else "")
    outcome = NO_CASE if not tried else CRASHED if raised else SURVIVED
    return FaultScore(fault.id, fault.kind, outcome, tried, time.perf_counter() - begin, reason=raised)


def applicable(fault: Fault, rule: str = "ours") -> Iterator[tuple[RunnerMode, Case]]:
    """The cases that a fault changes anything in, cheapest first."""
    find = suite if rule == "ours" else fixed_cases
    pairs = [(mode, case) for mode in fault.modes if mode in ADAPTED_MODES for case in find(fault.attention, mode)]
    for mode, case in sorted(pairs, key=lambda pair: cost(*pair)):
        if fault.applies(case, mode):
            yield mode, case


@cache
def cost(mode: RunnerMode, case: Case) -> int:
    """Work of a cell, roughly: what the padded batches of its schedule multiply, and a constant for each."""
    batches = schedule(case, mode).batches
    work = sum(b.batch_size * max([1, *b.new_lens]) * max([1, *b.kv_lens]) * b.heads.q * b.heads.dim for b in batches)
    return work + len(batches) * 1_000_000


def _ours(row: Row, mode: RunnerMode, case: Case) -> _Sight:
    """The judgement of a row of the matrix, short of its negative controls."""
    cell = run_cell(row, mode, case, torch.device("cpu"), controls=(), diagnosed=False)
    raised = any(trial.error is not None for trial in cell.trials)
    return _Sight(cell.status != "pass" and not raised, raised, _probe(cell), cell.reason)


def _probe(cell: CellResult) -> str:
    if cell.status == "pass":
        return ""
    failed = next((trial.probe for trial in cell.trials if not trial.passed), "")
    broken = next((result.name for result in cell.properties if result.broken_promise), "")
    return failed or broken or "peaked against poison"


def _fixed(row: Row, mode: RunnerMode, case: Case) -> _Sight:
    try:
        reason = fixed_rule_rejects(row, mode, case, torch.device("cpu"))
    except Exception as error:  # noqa: BLE001 - whatever a faulty backend raises is counted apart
        return _Sight(False, True, "", f"{type(error).__name__}: {error}")
    return _Sight(bool(reason), False, "zeros", reason)
