"""MATRIX.md and README come from records alone; stale verdicts are greyed."""

from __future__ import annotations

import pytest
from made_records import record

from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.registry import UsageError
from attnmatrix.matrix.render import render_matrix, render_readme

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


def test_a_row_known_to_records_only_is_shown_as_recorded() -> None:
    assert "| `elsewhere` | ✓ 1" in render_matrix([record(backend="elsewhere", fingerprint="other")])


def test_devices_are_kept_apart_in_one_cell() -> None:
    page = render_matrix([record(), record(device="NVIDIA H200", capability="9.0")])
    assert "H200 · 0.40 · 7/7<br>✓ 1 · p16 d128 bf16 · CPU" in page


def test_reasons_name_what_is_not_a_pass() -> None:
    page = render_matrix([record(status="blocked", reason="pages | of 16")])
    assert "pages \\| of 16" in page


def test_rendering_twice_gives_the_same_page() -> None:
    records = [record(), record(mode="verify", status="fail", reason="x")]
    assert render_matrix(records) == render_matrix(list(reversed(records)))


def test_the_readme_changes_between_its_markers_only() -> None:
    text = render_readme([record()], f"a\n{BEGIN}\nold\n{END}\nb\n{SCORES}")
    assert text.startswith(f"a\n{BEGIN}\n")
    assert f"{END}\nb\n" in text
    assert "old" not in text
    assert "✓ 1 CPU" in text


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(UsageError, match="matrix:begin"):
        render_readme([record()], "nothing here")
