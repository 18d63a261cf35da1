"""Cells that FlashInfer's rows are tried on over the strict stand-in, and how one is run."""

from __future__ import annotations

from typing import Any

import torch

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.cell import CellResult, run_cell
from attnmatrix.harness.registry import Row, find_row

SOFTMAX, CPU = AttentionKind.SOFTMAX, torch.device("cpu")
EAGER, VERIFY, CG, VERIFY_CG = RunnerMode.EAGER, RunnerMode.VERIFY, RunnerMode.CG_DECODE, RunnerMode.VERIFY_CG
PCG, BCG = RunnerMode.PCG_EXTEND, RunnerMode.BCG_EXTEND
WRAPPERS = ("fi", "fi-fa2", "fi-fa3", "fi-hnd")  # by turns: they differ in names handed over, and in the layout of the pool

CELLS = (
    (EAGER, "extend-p16-prefix0.20.33-new18.7.1-h4x2x64-bf16-shuffled"),
    (EAGER, "extend-p1-prefix2.4-new3.1-h4x2x64-fp16-shuffled"),
    (EAGER, "mixed-p16-prefix0.20.33-new18.7.1-h4x2x64-bf16-shuffled"),
    (EAGER, "extend-p16-prefix0.0.3-new0.0.2-h4x2x64-bf16-shuffled-scratchfirst"),
    (EAGER, "extend-p16-prefix5.9-new2.0-h4x2x64-bf16-shuffled"),
    (EAGER, "idle-p16-prefix-new-h4x2x64-bf16-shuffled"),
    (EAGER, "decode-p16-prefix14.15.16-new1.1.1-h4x2x64-bf16-shuffled"),
    (EAGER, "decode-p16-prefix5.17.64-new1.1.1-h14x2x64-bf16-shuffled-strided"),
    (EAGER, "extend-p16-prefix3.15.48-new1.1.6-h4x2x64-bf16-shuffled-w16-wfirst"),
    (EAGER, "decode-p16-prefix3.15.48-new1.1.1-h4x2x64-bf16-shuffled-w4"),
    (EAGER, "extend-p16-prefix0.20.33-new18.7.1-h4x2x64-bf16-shuffled-cap5"),
    (EAGER, "decode-p16-prefix5.17-new1.1-h4x2x64-bf16-shuffled-cap5"),
    (EAGER, "extend-p16-prefix0.20-new18.7-h4x2x64-bf16-shuffled-sinks"),
    (EAGER, "decode-p16-prefix5.17-new1.1-h4x2x64-bf16-shuffled-w8-wfirst-sinks"),
    (CG, "decode-p16-prefix15.3-new1.1-h4x2x64-bf16-shuffled"),
    (CG, "decode-p16-prefix15.3-new1.1-h4x2x64-bf16-shuffled-w4-wfirst"),
    (CG, "decode-p1-prefix7-new1-h4x2x64-bf16-shuffled-sinks"),
    (PCG, "extend-p16-prefix0.20-new18.7-h4x2x64-bf16-shuffled"),
    (BCG, "extend-p16-prefix0.20-new18.7-h4x2x64-bf16-shuffled"),
    (VERIFY, "target_verify-p16-prefix14.15.16-new4.4.4-h4x2x64-bf16-shuffled"),
    (VERIFY, "target_verify-p16-prefix18.5.40-new2.5.3-h4x2x64-bf16-shuffled-w8"),
    (VERIFY_CG, "target_verify-p16-prefix14.31-new4.4-h4x2x64-bf16-shuffled"),
    (VERIFY_CG, "target_verify-p16-prefix20.5-new4.4-h4x2x64-bf16-shuffled-w4-sinks"),
)
QUANTISED = (
    (EAGER, "extend-p16-prefix0.20-new18.7-h4x2x64-bf16-shuffled-cap5-kvfp8e4m3"),
    (EAGER, "decode-p16-prefix5.17-new1.1-h4x2x64-fp16-shuffled-kvfp8e4m3"),
    (CG, "decode-p16-prefix15.3-new1.1-h4x2x64-bf16-shuffled-kvfp8e4m3"),
    (VERIFY, "target_verify-p16-prefix18.5-new5.2-h4x2x64-bf16-shuffled-kvfp8e4m3-treer.r.0.1.2_r.r"),
)
MASKED = (
    (VERIFY, "target_verify-p16-prefix24.7-new6.6-h4x2x64-bf16-shuffled-w8-treer.0.0.1.1.2"),
    (VERIFY, "target_verify-p16-prefix18.5-new5.2-h4x2x64-bf16-shuffled-treer.r.0.1.2_r.r"),
    (VERIFY_CG, "target_verify-p1-prefix9.4-new5.5-h4x2x64-bf16-shuffled-treer.r.0.1.2"),
    (VERIFY_CG, "target_verify-p16-prefix24.7-new6.6-h4x2x64-bf16-shuffled-w8-treer.0.0.1.1.2"),
)
XQA = (
    (EAGER, "decode-p16-prefix14.15.16-new1.1.1-h4x2x64-bf16-shuffled"),
    (EAGER, "decode-p32-prefix3.15.48-new1.1.1-h4x2x64-bf16-shuffled-w4-wfirst-sinks"),
    (CG, "decode-p16-prefix15.3-new1.1-h4x2x64-bf16-shuffled"),
    (VERIFY, "target_verify-p16-prefix14.15.16-new4.4.4-h4x2x64-bf16-shuffled"),
    (VERIFY, "target_verify-p16-prefix20-new1-h4x2x64-bf16-shuffled"),
    (VERIFY, "target_verify-p16-prefix14.31-new6.6-h4x2x64-bf16-shuffled-treer.0.0.1.1.2"),
    (VERIFY_CG, "target_verify-p16-prefix14.31-new6.6-h4x2x64-bf16-shuffled-treer.0.0.1.1.2"),
)
DECODE, TREE = (
    "decode-p16-prefix15.3-new1.1-h4x2x64-bf16-shuffled",
    "target_verify-p16-prefix24.7-new6.6-h4x2x64-bf16-shuffled-treer.0.0.1.1.2",
)


def cell(name: str | Row, mode: RunnerMode, case: str, controls: Any = (), diagnosed: bool = False) -> CellResult:
    row = find_row(name, SOFTMAX) if isinstance(name, str) else name
    return run_cell(row, mode, parse_case(case), CPU, controls=controls, diagnosed=diagnosed)
