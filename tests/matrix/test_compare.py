"""Comparing evidence: worse and missing are regressions, better and new are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_records import record

from attnmatrix.matrix.cli import main
from attnmatrix.matrix.compare import compare_evidence
from attnmatrix.matrix.evidence_file import write


@pytest.mark.parametrize(
    ("before", "after", "regression"),
    [
        ("pass", "fail", True),
        ("pass", "known", True),
        ("known", "pass", False),
        ("fail", "crash", True),
        ("blocked", "pass", True),
        ("fail", "vacuous", False),
    ],
)
def test_a_changed_status(before: str, after: str, regression: bool) -> None:
    (change,) = compare_evidence([record(status=before)], [record(status=after)])
    assert (change.before, change.after, change.regression) == (before, after, regression)


def test_equal_sets_do_not_differ_whatever_the_versions() -> None:
    assert compare_evidence([record()], [record(versions={"torch": "9"}, utc="2027-01-01T00:00:00Z")]) == []


def test_a_cell_that_is_not_run_any_more_is_a_regression() -> None:
    (change,) = compare_evidence([record()], [])
    assert change.after == "untested"
    assert change.regression


@pytest.mark.parametrize(
    ("status", "regression"), [("pass", False), ("blocked", False), ("known", False), ("fail", True), ("vacuous", True)]
)
def test_a_cell_met_for_the_first_time_is_one_only_if_it_is_not_as_declared(status: str, regression: bool) -> None:
    (change,) = compare_evidence([], [record(status=status)])
    assert (change.before, change.regression) == ("untested", regression)


def test_a_device_that_only_the_old_evidence_has_is_named_and_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    h200 = record(device="NVIDIA H200", capability="9.0")
    write(tmp_path / "old.jsonl", [record(), record(mode="verify"), h200])
    write(tmp_path / "new.jsonl", [record()])
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(tmp_path / "old.jsonl"), str(tmp_path / "new.jsonl")])
    told = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1
    assert told[0].startswith("WORSE torch verify cpu: pass -> untested")
    assert told[1:] == ["not compared: NVIDIA H200, of which the new evidence has no record", "1 cells changed, 1 regressions"]
