"""Comparing evidence: worse and missing are regressions, better is not."""

from __future__ import annotations

import pytest
from made_records import record

from attnmatrix.matrix.compare import compare_evidence


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
