"""A cell shows its worst status, counts, axes, device, margin and controls."""

from __future__ import annotations

import pytest
from made_records import record

from attnmatrix.matrix.status import AS_DECLARED, MARKS, ORDER, summarise


def _cell(*statuses: str, **changes: object):
    return summarise([record(**changes) for _ in statuses], statuses)


def test_every_status_has_a_mark() -> None:
    assert set(MARKS) == set(ORDER)
    assert set(ORDER) >= AS_DECLARED


@pytest.mark.parametrize("worse", range(len(ORDER) - 1))
def test_the_worst_status_wins(worse: int) -> None:
    assert _cell(ORDER[worse + 1], ORDER[worse], ORDER[-1]).status == ORDER[worse]


def test_a_passing_cell_reads_like_the_legend() -> None:
    assert _cell("pass", "pass", device="NVIDIA H200", graph="cuda").text() == "✓ 2 · p16 d128 bf16 · H200 cuda · 0.40 · 14/14"


def test_known_faults_are_counted_among_the_judged() -> None:
    cell = _cell("known", "pass", "pass", "blocked")
    assert cell.text().startswith("✗ 1 known / 3 (+ 1 blocked)")


def test_verdicts_of_other_code_are_not_counted_among_the_judged() -> None:
    assert _cell("known", "pass", "stale", "stale", "n/a").text().startswith("✗ 1 known / 2 (+ 2 stale, 1 n/a)")
    assert _cell("stale", "pass", "pass", "blocked").text().startswith("stale 1 / 3 (+ 1 blocked)")
    assert _cell("stale", "blocked").text().startswith("stale 1 (+ 1 blocked)")


def test_what_a_cell_covers_is_what_this_code_judged() -> None:
    other = record(case="extend-p64-prefix0-new3-h4x2x256-fp16-shuffled")
    assert " · p16 d128 bf16 · " in summarise([record(), other], ["known", "stale"]).text()
    assert " · p64 d256 fp16 · " in summarise([record(), other], ["blocked", "stale"]).text()
    assert summarise([record(), other], ["known", "stale"]).controls == summarise([record()], ["known"]).controls


def test_two_bad_statuses_are_both_named() -> None:
    assert _cell("fail", "known", "pass").text().startswith("✗ 1 fail 1 known / 3")


def test_a_blocked_cell_gives_its_reason() -> None:
    assert _cell("blocked", reason="topk > 1 (NotImplementedError seen)").text() == "blocked: topk > 1 (NotImplementedError seen)"


def test_a_pass_without_controls_proves_nothing() -> None:
    assert _cell("pass", "pass", controls={}).status == "vacuous"
