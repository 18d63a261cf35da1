"""FlashInfer's known faults, over a stand-in that has them: each is declared where it shows, with the diagnosis that it gets, and no further."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import strict_flashinfer
import strict_flashinfer_wrappers
from flashinfer_cells import BCG, CG, EAGER, SOFTMAX, VERIFY, VERIFY_CG, cell

from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.capabilities import Capabilities
from attnmatrix.harness.registry import find_row


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    strict_flashinfer.install(monkeypatch)


FAULTS = (
    ("fi-fa2", EAGER, "extend-p16-prefix0.20-new8.3-h4x2x80-bf16-shuffled", "head_dim_80"),
    ("fi", EAGER, "decode-p16-prefix5.32-new1.1-h4x2x96-bf16-shuffled", "head_dim_80"),
    ("fi-fa2", BCG, "extend-p16-prefix0.20-new8.3-h4x2x96-bf16-shuffled", "head_dim_80"),
    ("fi-hnd", CG, "decode-p16-prefix5.32-new1.1-h4x2x80-bf16-shuffled", "head_dim_80"),
    ("fi-fa2", EAGER, "extend-p16-prefix0.20-new8.7-h4x2x64-bf16-shuffled-alibi", "alibi_shifts_lse"),
    ("fi-hnd", EAGER, "decode-p16-prefix5.17-new1.1-h6x2x64-bf16-shuffled-alibi", "alibi_shifts_lse"),
    ("fi", VERIFY, "target_verify-p16-prefix20.5-new3.3-h4x2x64-bf16-shuffled-alibi", "alibi_shifts_lse"),
    ("fi-fa3", EAGER, "extend-p16-prefix0.20-new8.7-h4x2x64-bf16-shuffled-alibi", "fa3_leaves_alibi_out"),
    ("fi-fa3", EAGER, "decode-p16-prefix40.17-new1.1-h4x2x64-bf16-shuffled-alibi", "fa3_leaves_alibi_out"),
    ("fi-fa3", BCG, "extend-p16-prefix0.20-new8.7-h4x2x64-bf16-shuffled-alibi", "fa3_leaves_alibi_out"),
    ("fi-fa2", EAGER, "extend-p64-prefix70-new17-h7x1x80-bf16-scattered-kvfp8e4m3-drop200", "head_dim_80"),
    ("fi-fa2", EAGER, "extend-p16-prefix0.20-new8.3-h4x2x64-bf16-shuffled-drop12000", "infinity"),
    ("fi-fa2", VERIFY, "target_verify-p16-prefix40.6-new4.4-h4x2x64-bf16-shuffled-drop12000", "infinity"),
    ("fi", EAGER, "extend-p16-prefix0.20-new8.3-h4x2x64-bf16-shuffled-drop12000", "infinity"),
    ("fi", EAGER, "decode-p16-prefix40.6-new1.1-h4x2x64-bf16-shuffled-drop12000", "infinity"),
    ("fi-fa3", EAGER, "decode-p16-prefix40.6-new1.1-h4x2x64-bf16-shuffled-drop12000", "infinity"),
    ("fi-hnd", VERIFY_CG, "target_verify-p16-prefix40.6-new4.4-h4x2x64-bf16-shuffled-drop12000", "infinity"),
    ("fi-fa2", EAGER, "decode-p16-prefix5.32-new1.1-h2x1x192-bf16-shuffled", "decode_of_head_dim_192"),
    ("fi-fa2", CG, "decode-p16-prefix5.32-new1.1-h2x1x192-bf16-shuffled", "head_dim_80"),
    ("fi", CG, "decode-p16-prefix5.32-new1.1-h2x1x192-bf16-shuffled", "head_dim_80"),
    ("fi-fa2", EAGER, "extend-p16-prefix0.200-new8.3-h2x1x192-bf16-shuffled", "head_dim_80"),
    ("trtllm", EAGER, "decode-p16-prefix5.17.64-new1.1.1-h4x2x64-bf16-shuffled-strided", "strided_queries"),
    ("trtllm", CG, "decode-p16-prefix5.17.64-new1.1.1-h4x2x64-bf16-shuffled-strided", "strided_queries"),
    ("trtllm", VERIFY, "target_verify-p32-prefix40.12-new6.6-h4x2x64-fp16-shuffled-w12-strided", "strided_queries"),
    ("trtllm", VERIFY, "target_verify-p16-prefix24.7-new6.6-h4x2x64-bf16-shuffled-w8-treer.0.0.1.1.2", "verify_has_no_window"),
    ("trtllm", VERIFY_CG, "target_verify-p16-prefix6.8-new4.4-h4x2x64-bf16-shuffled-w8", "verify_has_no_window"),
)


@pytest.mark.parametrize(("name", "mode", "case", "finding"), FAULTS)
def test_a_known_fault_fails_with_its_diagnosis(name: str, mode: RunnerMode, case: str, finding: str) -> None:
    result = cell(name, mode, case, diagnosed=True)
    assert result.status == "known", (result.reason, result.diagnosis, *result.details)
    assert finding in result.reason


@pytest.mark.parametrize(
    ("name", "mode", "case"),
    [
        ("fi-fa2", EAGER, "extend-p16-prefix0-new8-h4x2x64-bf16-shuffled-alibi"),
        ("fi-fa2", CG, "decode-p16-prefix40.17-new1.1-h4x2x64-bf16-shuffled-alibi"),
        ("fi", EAGER, "extend-p16-prefix0-new8-h4x2x128-bf16-shuffled"),
        ("fi-fa2", EAGER, "decode-p16-prefix40.6-new1.1-h4x2x64-bf16-shuffled-drop12000"),
        ("fi", EAGER, "extend-p16-prefix0.20-new8.3-h4x2x64-bf16-shuffled-drop200"),
        ("fi", EAGER, "decode-p16-prefix5.32-new1.1-h2x1x192-bf16-shuffled"),
        ("fi-fa2", EAGER, "decode-p16-prefix5.32-new1.1-h5x1x192-bf16-shuffled"),
        ("fi-fa2", EAGER, "extend-p16-prefix0.20-new8.3-h2x1x192-bf16-shuffled"),
        ("trtllm", EAGER, "decode-p16-prefix24.7-new1.1-h4x2x64-bf16-shuffled-w8"),
        ("trtllm", VERIFY, "target_verify-p16-prefix2.3-new3.3-h4x2x64-bf16-shuffled-w8"),
    ],
)
def test_beside_its_fault_the_row_is_right(name: str, mode: RunnerMode, case: str) -> None:
    result = cell(name, mode, case)
    assert result.status == "pass", (result.reason, *result.details)


def test_a_package_without_the_faults_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_flashinfer_wrappers, "BLOCK", 16)
    result = cell("fi-fa2", *FAULTS[0][1:3])
    assert result.status == "fail"
    assert result.reason.endswith("but it passes")


@pytest.mark.parametrize(
    ("name", "mode", "case", "finding"),
    [next(fault for fault in FAULTS if fault[3] == name) for name in dict.fromkeys(fault[3] for fault in FAULTS)],
)
def test_another_failure_than_the_known_one_is_an_error(name: str, mode: RunnerMode, case: str, finding: str) -> None:
    row = find_row(name, SOFTMAX)
    known = row.capabilities.known_fault(mode, parse_case(case))
    assert known is not None and isinstance(row.capabilities, Capabilities)
    other = replace(row, capabilities=replace(row.capabilities, known_faults=(replace(known, diagnosis="X26"),)))
    result = cell(other, mode, case, diagnosed=True)
    assert result.status == "fail"
    assert result.reason.startswith("fails otherwise than its known fault says (X26)")


def test_an_undefined_output_is_an_output() -> None:
    """Not an exception, nor a wrong LSE beside a right output."""
    for name, mode, case, _ in (FAULTS[3], FAULTS[4]):
        row = find_row(name, SOFTMAX)
        known = row.capabilities.known_fault(mode, parse_case(case))
        assert known is not None and isinstance(row.capabilities, Capabilities)
        other = replace(row, capabilities=replace(row.capabilities, known_faults=(replace(known, diagnosis="undefined"),)))
        assert cell(other, mode, case, diagnosed=True).status == "fail"


@pytest.mark.parametrize(
    ("name", "explained"),
    [
        ("fa2_head_dim_80_is_read_to_64", "columns 64 to 79 as they were"),
        ("alibi_shifts_lse", "slope times prefix larger"),
        ("fa3_leaves_alibi_out", "no bias"),
        ("minus_infinity_is_50000", "mean of what is masked"),
        ("cuda_core_decode_of_head_dim_192", "sums of 16 threads"),
        ("xqa_reads_strided_queries_as_contiguous", "read as contiguous"),
        ("xqa_verify_has_no_window", "no window"),
    ],
)
def test_a_reproduction_shows_the_fault_of_the_stand_in(name: str, explained: str) -> None:
    errors = importlib.import_module(f"attnmatrix.matrix.findings.flashinfer_{name}").main("cpu")
    assert errors[explained] < 5e-3 < 0.3 < errors["right"]
