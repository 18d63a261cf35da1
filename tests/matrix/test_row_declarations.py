"""A row's declaration is checked when it is registered: one line that says which row and what is wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.suites import gpu_suite
from attnmatrix.harness import registry
from attnmatrix.harness.adapted_modes import ADAPTED_MODES
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.capabilities import Blocked, Capabilities, Deferred, KnownFault, NotApplicable
from attnmatrix.harness.registry import Row, UsageError, rows
from attnmatrix.harness.row_check import claim_problem, row_problem
from attnmatrix.matrix.selection import Selection

GOOD = Row("good-row", AttentionKind.SOFTMAX, TorchSoftmax, source=__file__)
BAD_NAMES = ("", "A", "a b", "a,b", "*", "-n", "a/b", "a\n", "é", "fa", "auto", None)
BAD: dict[str, dict[str, object]] = {
    "kind": {"kind": "softmax"},
    "create": {"create": None},
    "devices": {"devices": ()},
    "devices ": {"devices": "cuda"},
    "devices  ": {"devices": ("cpu", "tpu")},
    "devices   ": {"devices": ("cpu", "cpu")},
    "devices lacks": {"devices": ("cuda",), "interpreted": True},
    "distributions": {"distributions": "torch"},
    "distributions ": {"distributions": ()},
    "distributions  ": {"distributions": ("a b",)},
    "dtypes": {"dtypes": ("float8",)},
    "source": {"source": ""},
    "source ": {"more_sources": ("absent.py",)},
    "conventions": {"conventions": None},
    "capabilities is": {"capabilities": None},
    "capabilities.modes has keys": {"capabilities": Capabilities(modes={"eager": NotApplicable("x", lambda: True)})},  # type: ignore[dict-item]
    "capabilities.modes has values": {"capabilities": Capabilities(modes={RunnerMode.EAGER: "no"})},  # type: ignore[dict-item]
    "capabilities.why_not": {"capabilities": Capabilities(why_not=None)},  # type: ignore[arg-type]
    "capabilities.known_faults": {"capabilities": Capabilities(known_faults=["B04"])},  # type: ignore[arg-type]
    "capabilities.deterministic": {"capabilities": Capabilities(deterministic="yes")},  # type: ignore[arg-type]
}


def fails(*given: object) -> bool:
    raise ZeroDivisionError("boom")


UNCHECKABLE: dict[str, dict[str, Any]] = {
    "got 'no window'": {"why_not": lambda case: "no window"},
    "got True": {"why_not": lambda case: True},
    "got <class": {"why_not": lambda case: Blocked},
    "got 5": {"interpreter_limits": lambda case: 5},
    "ZeroDivisionError: boom": {"why_not": fails},
    "takes 0 positional arguments": {"why_not": lambda: None},
    "boom": {"known_faults": (KnownFault(fails, "f", "X1", "r"),)},
    "known fault 'f' answers True or False": {"known_faults": (KnownFault(lambda case, mode: "no", "f", "X1", "r"),)},  # type: ignore[arg-type,return-value]
    r"check of NotApplicable\('r'\) answers True or False": {"why_not": lambda case: NotApplicable("r", lambda: "no")},  # type: ignore[arg-type,return-value]
    "raised, asked about case .*: ZeroDivisionError": {"why_not": lambda case: NotApplicable("r", fails)},
    "'NoneType' object is not callable": {"why_not": lambda case: NotApplicable("r", None)},  # type: ignore[arg-type]
    "a deferral needs an issue": {"why_not": lambda case: Deferred("r", "")},
    "unterminated character set": {"why_not": lambda case: Blocked("r", "ValueError", "([")},
}


@pytest.mark.parametrize("said", UNCHECKABLE)
@pytest.mark.parametrize("interpreted", [False, True])
def test_a_claim_that_cannot_be_checked_is_refused_before_anything_runs(said: str, interpreted: bool) -> None:
    registry.register(replace(GOOD, capabilities=Capabilities(**UNCHECKABLE[said]), interpreted=interpreted))
    with pytest.raises(UsageError, match=f"backend 'good-row': .*{said}"):
        Selection(backends=("good-row",), modes=("eager",)).cells()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_claims_of_this_repository_can_be_checked(device: str) -> None:
    for row in rows():
        if not row.missing:
            for mode in ADAPTED_MODES:
                assert [problem for case in gpu_suite(row.kind, mode) if (problem := claim_problem(row, mode, case, device))] == []


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows()
    monkeypatch.setattr(registry, "_ROWS", dict(registry._ROWS))


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_a_name_that_nobody_can_type_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="name"):
        registry.register(replace(GOOD, name=name))
    assert all(row.name != name for row in rows())


@pytest.mark.parametrize("said", BAD, ids=str.strip)
def test_each_field_of_a_declaration_is_checked(said: str) -> None:
    with pytest.raises(UsageError, match=f"backend 'good-row': {said.strip()}"):
        registry.register(replace(GOOD, **BAD[said]))  # type: ignore[arg-type]
    assert all(row.name != "good-row" for row in rows())


def test_good_rows_are_taken() -> None:
    assert registry.register(GOOD) in rows()
    assert [row_problem(row) for row in rows()] == [None] * len(rows())


TWO_ROWS = """
from attnmatrix.cases.case import AttentionKind
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.registry import Row, register
print("a banner")
for name in ("first", "Second Row"):
    register(Row(name, AttentionKind.SOFTMAX, TorchSoftmax, source=__file__))
"""


def test_a_bad_row_of_a_plugin_is_one_line_and_adds_nothing(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO_ROWS)
    command = [sys.executable, "-m", "attnmatrix.matrix", "run", "--plugin", "two.py", "--backend", "first", "--evidence", "out/e.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("attnmatrix: plugin 'two.py': backend 'Second Row': a name is lower-case")
    assert len(done.stderr.splitlines()) == 1 and "a banner" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["two.py"]
    with pytest.raises(UsageError, match="Second Row"):
        registry.load_plugin(tmp_path / "two.py")
    assert all(row.name != "first" for row in rows())


def test_what_a_good_plugin_prints_does_not_spoil_json(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(TWO_ROWS.replace("Second Row", "second"))
    command = [sys.executable, "-m", "attnmatrix.matrix", "list", "backends", "--json", "--plugin", "loud.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("{") and done.stderr == "a banner\n"
