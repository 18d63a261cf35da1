"""Every planted fault is rejected by the judgement of the matrix, and its healthy twin passes on the same case."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.context import Context
from attnmatrix.harness.faults.fault import Fault, NotInjected, Subject, add, faults, not_injected
from attnmatrix.harness.faults.listed import LISTED
from attnmatrix.harness.faults.score import CRASHED, KILLED, NO_CASE, FaultScore, applicable, cost, score, score_fault
from attnmatrix.harness.probes import PROBES
from attnmatrix.harness.registry import Row, UsageError
from attnmatrix.harness.trial import describe, run_trial

CPU = torch.device("cpu")
HIDDEN_FROM_FIXED = ("page-tail", "race", "graph-stale", "batch-variance")


@cache
def by_id() -> dict[str, Fault]:
    return {fault.id: fault for fault in faults()}


@cache
def ours(fault_id: str) -> FaultScore:
    return score_fault(by_id()[fault_id], "ours")


Twin = tuple[Subject, Conventions, bool]
"""What healthy twins differ in, but for their names."""


def twin_of(fault: Fault) -> Twin:
    return fault.healthy, fault.conventions, fault.batch_invariant


@cache
def twin_row(twin: Twin) -> Row:
    return next(fault for fault in faults() if twin_of(fault) == twin).row(enabled=False)


@cache
def healthy(twin: Twin, mode: str, case: str, probe: str) -> tuple[str, ...]:
    """What is wrong with a healthy twin under the inputs that showed a fault. Many faults are found on the same case."""
    inputs = next((known for known in PROBES if known.name == probe), None)
    if inputs is not None:
        found = run_trial(twin_row(twin), RunnerMode(mode), parse_case(case), CPU, inputs)
        return () if found.passed else describe(found)
    result = run_cell(twin_row(twin), RunnerMode(mode), parse_case(case), CPU, controls=())
    return () if result.status == "pass" else (result.reason, *result.details)


@pytest.mark.parametrize("fault_id", by_id())
def test_a_fault_is_killed_and_its_healthy_twin_passes(fault_id: str) -> None:
    found = ours(fault_id)
    assert found.outcome == KILLED, f"{found.outcome} after {found.tried} cases {found.reason}"
    assert healthy(twin_of(by_id()[fault_id]), found.mode, found.case, found.probe) == ()


@pytest.mark.parametrize("twin", dict.fromkeys(map(twin_of, faults())), ids=lambda twin: twin[0].__name__)
def test_a_healthy_twin_passes_a_whole_cell(twin: Twin) -> None:
    """Under every probe, and with what examines properties: the cheapest case of its faults."""
    cases = [next(applicable(fault)) for fault in faults() if twin_of(fault) == twin]
    mode, case = min(cases, key=lambda pair: cost(*pair))
    result = run_cell(twin_row(twin), mode, case, CPU, controls=())
    assert result.status == "pass", (mode.value, case.id, result.reason)


def test_a_fault_says_what_it_is() -> None:
    for fault_id, fault in by_id().items():
        assert fault.kind and fault.title and fault.diagnosis and fault.modes, fault_id
        assert not fault.diagnosis.endswith(".") and not fault.diagnosis.startswith("output"), fault_id
        assert fault_id not in fault.like
        assert set(fault.like) <= set(by_id()), fault_id


def test_every_listed_fault_is_planted_or_says_why_not() -> None:
    known = {*by_id(), *(entry.id for entry in not_injected())}
    assert [entry.id for entry in LISTED if entry.id not in known] == []
    assert len({entry.id for entry in LISTED}) == len(LISTED) == 105


@pytest.mark.parametrize("entry", not_injected(), ids=lambda entry: entry.id)
def test_a_fault_that_is_not_run_has_a_reason(entry: NotInjected) -> None:
    assert entry.status in ("pending", "equivalent", "out of scope")
    assert len(entry.reason.split()) >= 4


def test_an_id_is_given_once() -> None:
    with pytest.raises(ValueError, match="registered twice"):
        add(by_id()["B04"])


def test_the_fixed_rule_misses_faults_that_ours_rejects() -> None:
    """That ours rejects each of them is shown above."""
    fixed = {found.fault: found.outcome for found in score("fixed", HIDDEN_FROM_FIXED)}
    missed = [fault_id for fault_id, outcome in fixed.items() if outcome != KILLED]
    assert len(missed) >= len(fixed) / 2, f"the fixed rule misses {missed} of {sorted(fixed)}"


@pytest.mark.parametrize("fault_id", ["B04", "X04", "X18", "X26"])
def test_the_fixed_rule_is_a_rule(fault_id: str) -> None:
    """It kills what is grossly wrong, else the comparison would say nothing; a scale error of 1 % is not."""
    assert (score_fault(by_id()[fault_id], "fixed").outcome == KILLED) == (fault_id != "X26")


def test_cheap_cases_come_first() -> None:
    cases = list(applicable(by_id()["X04"]))
    assert cases[0][0] is RunnerMode.EAGER
    assert max(cases[0][1].kv_lens) < max(cases[-1][1].kv_lens)


@pytest.mark.parametrize(("rule", "kinds"), [("theirs", None), ("ours", ["no-such-kind"])])
def test_an_unknown_rule_or_kind_is_named(rule: str, kinds: list[str] | None) -> None:
    with pytest.raises(UsageError, match=r"unknown .* known: "):
        score(rule, kinds)


class Raises(AttentionBackend):
    def prepare_metadata(self, batch: Batch) -> None:
        raise RuntimeError("no metadata today")

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:  # type: ignore[override]
        raise NotImplementedError


def test_an_exception_is_no_kill() -> None:
    def create(context: Context) -> AttentionBackend:
        return Raises(context)

    base = by_id()["B148"]
    for rule in ("ours", "fixed"):
        found = score_fault(replace(base, subject=create, applies=lambda case, mode: case.name == "cross_page_boundary"), rule)
        assert found.outcome == CRASHED
        assert "no metadata today" in found.reason
    assert score_fault(replace(base, applies=lambda case, mode: False), "ours").outcome == NO_CASE
