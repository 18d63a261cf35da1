"""The diagnosis score: every planted fault as a failing row, and whether the diagnosis names it."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import torch

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.diagnose import diagnose
from attnmatrix.harness.faults.fault import Fault, faults
from attnmatrix.harness.faults.score import applicable, check_rule

NAMED, ALIKE, MISSED, UNSEEN = "named", "alike", "missed", "nothing to compare"
CASES = 40  # applicable cases tried for one that the fault fails


@dataclass(frozen=True)
class DiagnosisScore:
    """What the diagnosis said of one fault on the cheapest case that it fails.

    ``outcome`` is ``named`` (the fault is among those found), ``alike`` (one that no output tells from it is), ``missed``, or ``nothing to
    compare`` (no case fails on its results: an exception, or a promise between trials). ``found`` are the ids that the diagnosis names.
    """

    fault: str
    kind: str
    outcome: str
    seconds: float
    mode: str = ""
    case: str = ""
    found: tuple[str, ...] = ()
    text: str = ""


def diagnosis_score(kinds: Collection[str] = ()) -> list[DiagnosisScore]:
    """Every fault, or those of some kinds. Raises UsageError for an unknown kind."""
    check_rule("ours", kinds)
    return [score_diagnosis(fault) for fault in faults() if not kinds or fault.kind in kinds]


def score_diagnosis(fault: Fault) -> DiagnosisScore:
    """One fault on the cheapest case that it fails."""
    for tried, (mode, case) in enumerate(applicable(fault)):
        if tried == CASES:
            break
        score = diagnosis_on(fault, mode, case)
        if score is not None:
            return score
    return DiagnosisScore(fault.id, fault.kind, UNSEEN, 0.0)


def diagnosis_on(fault: Fault, mode: RunnerMode, case: Case) -> DiagnosisScore | None:
    """One fault on one case; None where its results pass or cannot be compared."""
    device, row = torch.device("cpu"), fault.row()
    trials = run_cell(row, mode, case, device, controls=(), diagnosed=False).trials
    if not trials or trials[-1].passed or trials[-1].error is not None:
        return None
    begin = time.perf_counter()
    found = diagnose(row, mode, case, device, trials[-1])
    seconds = time.perf_counter() - begin
    outcome = NAMED if fault.id in found.ids else ALIKE if set(fault.like) & set(found.ids) else MISSED
    return DiagnosisScore(fault.id, fault.kind, outcome, seconds, mode.value, case.id, found.ids, str(found))
