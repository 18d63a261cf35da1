"""The worked example's numbers."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "mixed_batch.py"


def test_the_worked_example_prints_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    error = runpy.run_path(str(EXAMPLE))["main"]()
    text = capsys.readouterr().out
    assert error < 2e-6
    for line in (
        "cu_seqlens_q  = [0, 6, 9, 10]",
        "cache_seqlens = [6, 7, 9]",
        "out_loc       = [0, 1, 2, 3, 4, 5, 20, 21, 22, 58]",
        "last indices  = [5, 8, 9]",
        "[0, 1, 2, 3, 4, 5, 0, 0, 0]",
        "[40, 41, 42, 43, 20, 21, 22, 0, 0]",
        "[50, 51, 52, 53, 54, 55, 56, 57, 58]",
    ):
        assert line in text
