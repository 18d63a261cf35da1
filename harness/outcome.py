"""An outcome held against the row's claim: the case's status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnmatrix.harness.capabilities import Blocked, Claim, Deferred, KnownFault, NotApplicable
from attnmatrix.harness.diagnose import Diagnosis
from attnmatrix.harness.refusal import why_not_a_refusal
from attnmatrix.harness.registry import Row
from attnmatrix.harness.trial import Trial, describe


@dataclass(frozen=True)
class Outcome:
    """``status`` of the matrix; ``reason`` says why it is not ``pass``; ``details`` what went wrong, line by line."""

    status: str
    reason: str = ""
    details: tuple[str, ...] = ()


def judge_not_applicable(claim: NotApplicable) -> Outcome:
    """``n/a`` when the machine finds the cause, else the declaration is wrong."""
    if claim.check():
        return Outcome("n/a", claim.reason)
    return Outcome("fail", f"declared n/a ({claim.reason}), but the check does not find it so")


def judge_claim(row: Row, claim: Claim, known: KnownFault | None, trials: Sequence[Trial], differences: Sequence[str] = ()) -> Outcome:
    """The status of a case from all its trials; ``differences`` are promises between trials that were not kept."""
    found = tuple(dict.fromkeys(line for trial in trials for line in describe(trial))) + tuple(differences)
    passed = all(trial.passed for trial in trials) and not differences
    if isinstance(claim, Blocked):
        return _judge_blocked(row, claim, trials, found)
    if isinstance(claim, Deferred):
        if passed:
            return Outcome("fail", f"declared deferred ({claim.reason}), but it passes")
        return Outcome("deferred", f"{claim.reason} ({claim.issue})", found)
    if known is not None:
        if passed:
            return Outcome("fail", f"declared a known fault ({known.reason}), but it passes")
        return Outcome("known", f"{known.reason} (see {known.finding})", found)
    return Outcome("pass") if passed else Outcome("fail", found[0] if found else "failed", found)


def judge_diagnosis(outcome: Outcome, known: KnownFault | None, found: Diagnosis) -> Outcome:
    """A known fault must fail with the declared diagnosis, unless the case is too large for one."""
    if outcome.status != "known" or known is None or found.skipped or found.confirms(known.diagnosis):
        return outcome
    return Outcome("fail", f"fails otherwise than its known fault says ({known.diagnosis}): {found}", outcome.details)


def _judge_blocked(row: Row, claim: Blocked, trials: Sequence[Trial], found: tuple[str, ...]) -> Outcome:
    refused = [trial for trial in trials if trial.error is not None]
    for trial in refused:
        assert trial.error is not None
        problem = why_not_a_refusal(trial.error, claim, row)
        if problem is None and not trial.untouched:
            problem = "a pool was written before the refusal"
        if problem is not None:
            return Outcome("fail", f"declared blocked ({claim.reason}), but {problem}", found)
    if len(refused) == len(trials):
        return Outcome("blocked", f"{claim.reason} ({type(refused[0].error).__name__} seen)")
    if all(trial.passed for trial in trials if trial.error is None):
        return Outcome("fail", f"declared blocked ({claim.reason}), but the package computes it right: the limit is over-claimed", found)
    return Outcome("fail", f"declared blocked ({claim.reason}), but the package computes it wrong without refusing", found)
