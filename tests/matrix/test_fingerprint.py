"""The fingerprint follows code, not comments, docstrings or layout."""

from __future__ import annotations

import pytest

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.adapted_modes import ADAPTED_MODES
from attnmatrix.harness.registry import find_row, rows
from attnmatrix.harness.runners import RUNNERS
from attnmatrix.matrix.fingerprint import _RUNNERS, TOP, fingerprint, token_text
from attnmatrix.matrix.run import cell_fingerprint

CODE = 'def f(x):\n    """Doc."""\n    return f"{x}" + \'a\'  # why\n'


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace("# why", "# because"),
        CODE.replace('"""Doc."""', '"""Other\n    words."""'),
        CODE.replace('    """Doc."""\n', ""),
        CODE.replace("f(x):\n", "f(x):\n\n"),
        CODE.replace(" + ", "  +  "),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(same: str) -> None:
    assert token_text(same) == token_text(CODE)


@pytest.mark.parametrize("other", [CODE.replace("'a'", "'b'"), CODE.replace("{x}", "{x!r}"), CODE.replace("return", "yield")])
def test_code_counts(other: str) -> None:
    assert token_text(other) != token_text(CODE)


def test_a_string_that_does_something_is_no_docstring() -> None:
    assert token_text("x = 'a'\n") != token_text("x = 'b'\n")
    assert token_text("'a'.join(y)\n") != token_text("'b'.join(y)\n")


def test_kinds_and_modes_depend_on_their_own_files() -> None:
    row = (str(TOP / "harness" / "backends" / "torch_softmax.py"),)
    hashes = {
        fingerprint(AttentionKind.SOFTMAX, RunnerMode.EAGER, row),
        fingerprint(AttentionKind.LIGHTNING, RunnerMode.EAGER, row),
        fingerprint(AttentionKind.SOFTMAX, RunnerMode.CG_DECODE, row),
        fingerprint(AttentionKind.SOFTMAX, RunnerMode.EAGER, ()),
    }
    assert len(hashes) == 4


def test_the_interpreter_counts_for_interpreted_rows_on_a_cpu_alone() -> None:
    def differs(name: str) -> bool:
        row = find_row(name, AttentionKind.SOFTMAX)
        return cell_fingerprint(row, RunnerMode.EAGER, "cpu") != cell_fingerprint(row, RunnerMode.EAGER, "cuda")

    assert differs("sgl-triton")
    assert not differs("torch")


def test_the_adapted_modes_are_those_with_a_runner() -> None:
    assert set(RUNNERS) == ADAPTED_MODES == set(_RUNNERS)


def test_every_file_a_fingerprint_names_exists() -> None:
    for names in _RUNNERS.values():
        assert all((TOP / "harness" / "runners" / f"{name}.py").is_file() for name in names)
    assert all(row.source for row in rows())
