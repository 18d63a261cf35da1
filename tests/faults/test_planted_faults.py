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
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.context import Context
from attnmatrix.harness.faults.fault import Fault, NotInjected, add, faults, not_injected
from attnmatrix.harness.faults.listed import LISTED
from attnmatrix.harness.faults.score import CRASHED, KILLED, NO_CASE, FaultScore, applicable, score, score_fault
from attnmatrix.harness.registry import UsageError

CPU = torch.device("cpu")
HIDDEN_FROM_FIXED = ("page-tail", "race", "graph-stale", "batch-variance")


@cache
def by_id() -> dict[str, Fault]:
    return {fault.id: fault for fault in faults()}


@cache
def ours(fault_id: str) -> FaultScore:
    return score_fault(by_id()[fault_id], "ours")


@pytest.mark.parametrize("fault_id", by_id())
def test_a_fault_is_killed_and_its_healthy_twin_passes(fault_id: str) -> None:
    found = ours(fault_id)
    assert found.outcome == KILLED, f"{found.outcome} after {found.tried} cases {found.reason}"
    fault = by_id()[fault_id]
    twin = run_cell(fault.row(enabled=False), RunnerMode(found.mode), parse_case(found.case), CPU, controls=())
    assert twin.status == "pass", twin.reason


@pytest.mark.parametrize("fault_id", by_id())
def test_a_fault_says_what_it_is(fault_id: str) -> None:
    fault = by_id()[fault_id]
    assert fault.kind and fault.title and fault.diagnosis and fault.modes
    assert not fault.diagnosis.endswith(".") and not fault.diagnosis.startswith("output")
    assert fault_id not in fault.like
    assert set(fault.like) <= set(by_id())


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
    fixed = {found.fault: found.outcome for found in score("fixed", HIDDEN_FROM_FIXED)}
    assert all(ours(fault_id).outcome == KILLED for fault_id in fixed)
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
