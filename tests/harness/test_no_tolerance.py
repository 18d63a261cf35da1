"""Nobody can loosen the comparison by a number, and a comparison that was loosened proves nothing and says so."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness import measure
from attnmatrix.harness.capabilities import Capabilities, Conventions, KnownFault, RoundingStep
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.registry import Row, find_row

ROOT = Path(__file__).resolve().parents[2]
APART = (
    ROOT / "harness" / "faults" / "fixed_rule.py",  # the other suites' rule, for comparison
    ROOT / "harness" / "tape.py",  # refuses torch.allclose, which reads a device value, during capture
)
SOURCES = sorted(path for package in ("cases", "references", "harness", "matrix") for path in (ROOT / package).rglob("*.py"))
WORDS = {"atol", "rtol", "tol", "tolerance", "allclose", "isclose", "assert_close", "approx"}
CPU = torch.device("cpu")


def names(tree: ast.AST) -> set[str]:
    """Every identifier, attribute, argument and keyword of a file."""
    found: set[str] = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            value = getattr(node, field, None)
            found |= {value} if isinstance(value, str) else set()
    return found


def test_no_source_names_a_tolerance() -> None:
    guilty = {path.name: sorted(names(ast.parse(path.read_text())) & WORDS) for path in SOURCES if path not in APART}
    assert {name: words for name, words in guilty.items() if words} == {}


@pytest.mark.parametrize("claim", [Row, Capabilities, Conventions, KnownFault, RoundingStep])
def test_nothing_a_row_declares_is_a_number(claim: type) -> None:
    assert [field.name for field in dataclasses.fields(claim) if field.type in ("float", "int", "complex", float, int)] == []


def test_the_factor_is_set_in_one_place() -> None:
    setters = {
        path.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if (target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else "") == "FACTOR"
    }
    assert setters == {"measure.py"}


@pytest.mark.parametrize(
    ("kind", "mode", "case_id"),
    [
        (AttentionKind.SOFTMAX, RunnerMode.EAGER, "extend-p16-prefix0.8.16-new15.8.1-h4x2x64-bf16-shuffled"),
        (AttentionKind.SOFTMAX, RunnerMode.CG_DECODE, "decode-p16-prefix14.15.16-new1.1.1-h4x2x64-bf16-shuffled"),
        (AttentionKind.LIGHTNING, RunnerMode.EAGER, "lightning-extend-p16-prefix0.8.16-new15.8.1-h3x3x128-bf16-shuffled"),
        (AttentionKind.LIGHTNING, RunnerMode.VERIFY, "lightning-target_verify-p1-prefix7.9-new3.3-h3x3x128-bf16-shuffled"),
    ],
)
def test_an_infinite_limit_makes_a_cell_vacuous(
    kind: AttentionKind, mode: RunnerMode, case_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, case = find_row("torch", kind), parse_case(case_id)
    assert run_cell(row, mode, case, CPU).status == "pass"

    def no_limit(baseline: Tensor, conditioning: Tensor) -> Tensor:
        return torch.full_like(baseline, float("inf"))

    monkeypatch.setattr(measure, "limits", no_limit)
    found = run_cell(row, mode, case, CPU)
    assert found.status == "vacuous"
    assert "accepted with" in found.reason
