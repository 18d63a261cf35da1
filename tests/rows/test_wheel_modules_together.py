"""Rows that load modules of one wheel with different stand-ins, in one process and in any order."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness import wheel_modules
from attnmatrix.harness.probes import PLAIN
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.trial import describe, run_trial

CASES = {
    "sgl-lightning": "lightning-decode-p16-prefix9-new1-h1x1x128-fp32-shuffled",
    "seg_la": "lightning-decode-p16-prefix9-new1-h1x1x128-fp32-shuffled",
    "sgl-triton": "decode-p16-prefix9-new1-h2x1x64-fp32-shuffled",
}


@pytest.mark.parametrize("order", list(permutations(CASES)), ids="-".join)
def test_any_order(order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_modules, "_LOADED", {})
    for name in order:
        case = parse_case(CASES[name])
        row = find_row(name, AttentionKind(case.kind))
        if row.missing:
            pytest.skip(f"{name}: package not installed")
        trial = run_trial(row, RunnerMode.EAGER, case, torch.device("cpu"), PLAIN)
        assert trial.passed, describe(trial)
