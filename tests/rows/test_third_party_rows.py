"""A few cells of each third-party row: right where it claims to be, refused, not applicable or known where it says so."""

from __future__ import annotations

import pytest
import torch

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.controls import CONTROLS
from attnmatrix.harness.registry import find_row

SOFTMAX, LIGHTNING = AttentionKind.SOFTMAX, AttentionKind.LIGHTNING
EAGER, VERIFY, CG, VERIFY_CG = RunnerMode.EAGER, RunnerMode.VERIFY, RunnerMode.CG_DECODE, RunnerMode.VERIFY_CG

CELLS = (
    ("conch", SOFTMAX, EAGER, "extend-p16-prefix0.0-new21.17-h4x2x64-fp16-shuffled", "pass"),
    ("conch", SOFTMAX, EAGER, "decode-p16-prefix14.15.16-new1.1.1-h4x2x64-fp16-shuffled", "pass"),
    ("conch", SOFTMAX, EAGER, "decode-p16-prefix150.3-new1.1-h4x2x64-fp32-shuffled", "pass"),
    ("conch", SOFTMAX, EAGER, "extend-p16-prefix8-new8-h4x2x64-fp32-shuffled", "known"),
    ("conch", SOFTMAX, EAGER, "decode-p16-prefix5-new1-h4x2x64-fp32-shuffled-sinks", "n/a"),
    ("conch", SOFTMAX, EAGER, "decode-p16-prefix5-new1-h4x2x64-fp32-shuffled-w4", "n/a"),
    ("conch", SOFTMAX, VERIFY, "target_verify-p16-prefix20-new1-h4x2x64-fp32-shuffled", "pass"),
    ("conch", SOFTMAX, VERIFY, "target_verify-p16-prefix9-new2-h4x2x64-fp32-shuffled-treer.r", "n/a"),
    ("conch", SOFTMAX, CG, "decode-p16-prefix15-new1-h2x1x32-fp32-shuffled", "pass"),
    ("conch", SOFTMAX, EAGER, "extend-p16-prefix0.0-new9.5-h4x2x64-fp32-shuffled-kvfp8e4m3", "pass"),
    ("conch", SOFTMAX, EAGER, "decode-p16-prefix14.16-new1.1-h4x2x64-fp16-shuffled-kvfp8e4m3", "pass"),
    ("sgl-triton", SOFTMAX, EAGER, "decode-p16-prefix14.16-new1.1-h2x2x64-fp16-shuffled-kvfp8e4m3", "pass"),
    ("sgl-triton", SOFTMAX, EAGER, "decode-p16-prefix14.16-new1.1-h4x2x64-fp32-shuffled-kvfp8e4m3", "deferred"),
    ("sgl-triton", SOFTMAX, EAGER, "extend-p16-prefix0.8-new9.5-h2x2x64-fp32-shuffled-kvfp8e4m3", "deferred"),
    ("seg_la", LIGHTNING, EAGER, "lightning-extend-p16-prefix0.20-new34.3-h1x1x64-bf16-shuffled", "pass"),
    ("seg_la", LIGHTNING, EAGER, "lightning-decode-p16-prefix14.15.16-new1.1.1-h1x1x128-bf16-shuffled", "pass"),
    ("seg_la", LIGHTNING, EAGER, "lightning-extend-p16-prefix0-new1-h1x1x128-fp32-shuffled", "known"),
    ("seg_la", LIGHTNING, EAGER, "lightning-extend-p16-prefix0.0.3-new0.0.2-h2x2x128-bf16-shuffled-scratchfirst", "known"),
    ("seg_la", LIGHTNING, EAGER, "lightning-decode-p16-prefix5.32-new1.1-h4x4x64-bf16-shuffled", "blocked"),
    ("seg_la", LIGHTNING, VERIFY, "lightning-target_verify-p1-prefix7.9-new3.3-h1x1x64-bf16-shuffled", "pass"),
    ("seg_la", LIGHTNING, VERIFY, "lightning-target_verify-p16-prefix20-new1-h1x1x128-bf16-shuffled", "known"),
    ("seg_la", LIGHTNING, VERIFY, "lightning-target_verify-p1-prefix9-new2-h1x1x64-bf16-shuffled-treer.r", "known"),
    ("seg_la", LIGHTNING, CG, "lightning-decode-p16-prefix15-new1-h1x1x128-bf16-shuffled", "pass"),
    ("flex", SOFTMAX, EAGER, "extend-p16-prefix0.8.16-new15.8.1-h4x2x64-bf16-shuffled", "pass"),
    ("flex", SOFTMAX, EAGER, "decode-p16-prefix5.17.64-new1.1.1-h4x2x64-bf16-shuffled-sinks", "pass"),
    ("flex", SOFTMAX, EAGER, "extend-p16-prefix0.20-new18.7-h4x2x64-bf16-shuffled-cap5-alibi", "pass"),
    ("flex", SOFTMAX, EAGER, "extend-p16-prefix0.20-new18.7-h4x2x64-bf16-shuffled-cap5-alibi-kvfp8e4m3", "pass"),
    ("flex", SOFTMAX, EAGER, "decode-p16-prefix5.17.64-new1.1.1-h4x2x64-fp16-shuffled-sinks-kvfp8e4m3", "pass"),
    ("flex", SOFTMAX, VERIFY, "target_verify-p16-prefix24.7-new6.6-h4x2x64-bf16-shuffled-w8-treer.0.0.1.1.2", "pass"),
    ("flex", SOFTMAX, CG, "decode-p16-prefix15.3-new1.1-h4x2x64-bf16-shuffled", "pass"),
    ("flex", SOFTMAX, VERIFY_CG, "target_verify-p1-prefix9.4-new5.5-h4x2x64-bf16-shuffled-treer.r.0.1.2", "pass"),
)


def missing(name: str, kind: AttentionKind) -> bool:
    return bool(find_row(name, kind).missing)


@pytest.mark.parametrize(("name", "kind", "mode", "case", "status"), CELLS, ids=[f"{c[0]}-{c[2].value}-{c[3]}" for c in CELLS])
def test_cell(name: str, kind: AttentionKind, mode: RunnerMode, case: str, status: str, device: torch.device) -> None:
    if missing(name, kind):
        pytest.skip(f"{name}: package not installed")
    result = run_cell(find_row(name, kind), mode, parse_case(case), device, controls=())
    assert result.status == status, (result.reason, *result.details)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("conch", "decode-p16-prefix14.15-new1.1-h2x1x64-fp16-shuffled"),
        ("conch", "decode-p16-prefix14.15-new1.1-h2x1x64-fp16-shuffled-kvfp8e4m3"),
        ("sgl-triton", "decode-p16-prefix14.15-new1.1-h2x2x64-fp16-shuffled-kvfp8e4m3"),
        ("flex", "extend-p16-prefix0.8-new15.8-h4x2x64-bf16-shuffled"),
        ("flex", "extend-p16-prefix0.8-new15.8-h4x2x64-bf16-shuffled-kvfp8e4m3"),
        ("seg_la", "lightning-extend-p16-prefix0.20-new5.3-h2x2x32-bf16-shuffled"),
    ],
)
def test_every_control_is_rejected_under_the_rows_rounding_steps(name: str, case: str, device: torch.device) -> None:
    parsed = parse_case(case)
    if missing(name, parsed.kind):
        pytest.skip(f"{name}: package not installed")
    controls = [control for control in CONTROLS if control.applies(parsed)]
    result = run_cell(find_row(name, parsed.kind), EAGER, parsed, device, controls=controls)
    assert result.status == "pass", (result.reason, *result.details)
    assert all(count.rejected == count.tried for count in result.controls.values())


@pytest.mark.skipif(missing("conch", SOFTMAX) or torch.cuda.is_available(), reason="a limit of the interpreter")
@pytest.mark.parametrize("option", ["bf16-shuffled", "fp32-shuffled-cap5"])
def test_limits_of_the_interpreter_are_not_the_packages(option: str, device: torch.device) -> None:
    result = run_cell(find_row("conch", SOFTMAX), EAGER, parse_case(f"decode-p16-prefix5-new1-h4x2x64-{option}"), device, controls=())
    assert result.status == "blocked"
    assert "interpreter" in result.reason


@pytest.mark.skipif(missing("conch", SOFTMAX) or not torch.cuda.is_available(), reason="a limit of the compiler")
def test_small_pages_do_not_compile(device: torch.device) -> None:
    result = run_cell(find_row("conch", SOFTMAX), EAGER, parse_case("decode-p1-prefix5-new1-h4x2x64-bf16-shuffled"), device, controls=())
    assert result.status == "blocked", result.reason
