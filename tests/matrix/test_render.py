"""MATRIX.md and README come from records alone; stale verdicts are greyed."""

from __future__ import annotations

import re

import msgspec
import pytest
from made_records import CASE, record

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.registry import UsageError, find_row
from attnmatrix.harness.row_suite import row_suite
from attnmatrix.matrix.record import Record
from attnmatrix.matrix.render import render_matrix, status_now
from attnmatrix.matrix.render_readme import render_readme
from attnmatrix.matrix.run import current_fingerprint
from attnmatrix.matrix.status import MARKS, ORDER

VERIFY = "target_verify-p16-prefix14.15.16-new4.4.4-h4x2x128-bf16-shuffled-eagle"
BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"
SCORES = "<!-- kill-score:begin -->\n<!-- kill-score:end -->"


def test_a_cell_without_records_is_a_dash() -> None:
    page = render_matrix([record()])
    line = next(line for line in page.splitlines() if line.startswith("| `torch` |") and "✓" in line)
    assert line.count("| –") == len(RunnerMode) - 1


def test_a_verdict_of_other_code_is_stale() -> None:
    page = render_matrix([record(fingerprint="other")])
    assert "stale 1" in page
    assert "✓ 1" not in page


def test_a_pairs_verdict_of_other_code_is_stale() -> None:
    pair = {"backend": "torch,flex", "mode": "handoff"}
    present = current_fingerprint(AttentionKind.SOFTMAX, "torch,flex", RunnerMode.HANDOFF, "cpu")
    assert present is not None
    assert status_now(record(**pair, fingerprint=present)) == "pass"
    assert status_now(record(**pair, fingerprint="other")) == "stale"
    assert "1 stale" in render_matrix([record(**pair, fingerprint="other")])


def test_a_row_known_to_records_only_is_shown_as_recorded() -> None:
    assert "| `elsewhere` | ✓ 1" in render_matrix([record(backend="elsewhere", fingerprint="other")])


def test_a_cell_says_how_many_of_its_cases_were_not_run() -> None:
    whole = len(row_suite(find_row("torch", AttentionKind.SOFTMAX), RunnerMode.VERIFY, "cuda", full=False))
    one = {"case": VERIFY, "mode": "verify", "case_hash": parse_case(VERIFY).content_hash, "device": "NVIDIA H200", "capability": "9.0"}
    fingerprint = current_fingerprint(AttentionKind.SOFTMAX, "torch", RunnerMode.VERIFY, "cuda")
    assert fingerprint is not None
    assert f"| ✓ 1 (+ {whole - 1} not run) · p16 " in render_matrix([record(**one, fingerprint=fingerprint)])
    blocked = render_matrix([record(**one, fingerprint=fingerprint, status="blocked", reason="no")])
    assert f"| blocked: no (+ {whole - 1} not run) |" in blocked


def test_what_a_cpu_samples_has_nothing_left_out() -> None:
    assert "not run" not in "".join(line for line in render_matrix([record(backend="flex")]).splitlines() if line.startswith("| `flex`"))


def test_a_pair_run_in_other_modes_than_handoff_is_a_row() -> None:
    pair = record(backend="torch,flex")
    assert "| `torch,flex` | ✓ 1" in render_matrix([msgspec.structs.replace(pair, fingerprint=_present("torch,flex", RunnerMode.EAGER))])
    assert "| `torch,flex` |" not in render_matrix([record(backend="torch,flex", mode="handoff")])


def _present(name: str, mode: RunnerMode) -> str:
    found = current_fingerprint(AttentionKind.SOFTMAX, name, mode, "cpu")
    assert found is not None
    return found


def test_devices_are_kept_apart_in_one_cell() -> None:
    page = render_matrix([record(), record(device="NVIDIA H200", capability="9.0")])
    assert re.search(r"H200 · 0\.40 · 7/7<br>✓ 1 \(\+ \d+ not run\) · p16 d128 bf16 · CPU", page)


def test_reasons_name_what_is_not_a_pass() -> None:
    page = render_matrix([record(status="blocked", reason="pages | of 16")])
    assert "pages \\| of 16" in page


def test_one_reason_of_many_modes_is_one_line_and_what_is_not_as_declared_comes_first() -> None:
    both = [record(mode=mode, status="fail", reason="off by one") for mode in ("verify", "eager")]
    page = render_matrix([*both, record(mode="cg_decode", status="blocked", reason="pages of 16")])
    wrong, declared = page.partition("### To look into")[2].partition("### As declared")[::2]
    assert wrong.count("off by one") == 1 and "| fail | 2 | eager, verify | off by one |" in wrong
    assert "pages of 16" in declared and "pages of 16" not in wrong


def test_failures_that_differ_in_numbers_share_a_line_and_those_of_other_faults_do_not() -> None:
    def fail(case: str, reason: str) -> Record:
        return record(case=case, status="fail", reason=reason, diagnosis=f"none of {len(case)} faults")

    long = "decode-p16-prefix14.15.16.17-new1x4-h4x2x128-bf16-shuffled"
    page = render_matrix([fail(long, "error 2.5 (Y80)"), fail(CASE, "error 1e-3 (Y80)"), fail(long, "error 9 (Y81)")])
    assert f"| fail | 2 | eager | error 1e-3 (Y80) | none of {len(CASE)} faults | `{CASE}` |" in page
    assert "| fail | 1 | eager | error 9 (Y81) |" in page


def test_the_legend_names_the_modes_that_nothing_drives() -> None:
    page = render_matrix([record()])
    assert "nothing drives these modes yet: DE eager, " in page
    for status in ORDER:
        assert MARKS[status] in page.partition("## softmax")[0]


def test_rendering_twice_gives_the_same_page() -> None:
    records = [record(), record(mode="verify", status="fail", reason="x")]
    assert render_matrix(records) == render_matrix(list(reversed(records)))


def test_the_readme_changes_between_its_markers_only() -> None:
    text = render_readme([record()], f"a\n{BEGIN}\nold\n{END}\nb\n{SCORES}")
    assert text.startswith(f"a\n{BEGIN}\n")
    assert f"{END}\nb\n" in text
    assert "old" not in text
    assert re.search(r"✓ 1 \(\+ \d+ not run\) CPU", text)


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(UsageError, match="matrix:begin"):
        render_readme([record()], "nothing here")
