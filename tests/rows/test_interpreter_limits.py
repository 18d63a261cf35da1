"""Why interpreted rows are given no states in bfloat16: Triton's interpreter cuts what a GPU rounds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.suites import suite
from attnmatrix.harness.interpreter import prepare_triton
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.row_suite import row_suite

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def store(source, target, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + at, tl.load(source + at).to(tl.bfloat16))
"""
ROW = find_row("seg_la", AttentionKind.LIGHTNING)


@pytest.mark.skipif(bool(ROW.missing) or torch.cuda.is_available(), reason="about Triton's interpreter")
def test_the_interpreter_cuts_to_bfloat16(tmp_path: Path) -> None:
    prepare_triton(torch.device("cpu"), interpreted=True)
    path = tmp_path / "cut_kernel.py"
    path.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location("cut_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["cut_kernel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = torch.randn(256, generator=torch.Generator().manual_seed(0))
    target = torch.empty(256, dtype=torch.bfloat16)
    module.store[(1,)](source, target, 256)
    cut = (source.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(target, cut)
    assert not torch.equal(target, source.bfloat16())


@pytest.mark.parametrize("full", [False, True])
def test_interpreted_rows_run_no_such_case_and_a_gpu_runs_them(full: bool) -> None:
    assert all(case.state_dtype is None for case in row_suite(ROW, RunnerMode.EAGER, "cpu", full))
    wanted = {case.id for case in suite(AttentionKind.LIGHTNING, RunnerMode.EAGER) if case.state_dtype}
    assert wanted
    assert wanted <= {case.id for case in row_suite(ROW, RunnerMode.EAGER, "cuda", full)}
