"""A cell that hangs, or leaves its GPU unusable, is a crash of its own; the next one runs in a fresh process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from attnmatrix.matrix.containment import DIED, DeviceLost, contained, device_error, reason_of
from attnmatrix.matrix.evidence_file import read_file

ROW = """
import os, sys, time
import torch
from attnmatrix.cases.case import AttentionKind
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.registry import Row, register
from attnmatrix.matrix import containment

def lose_device():
    containment.device_error = lambda device: "CUDA error: an illegal memory access was encountered"
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def write_out_of_bounds():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(pointer):
        tl.store(pointer + (1 << 45), 1)

    kernel[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))

class Odd(TorchSoftmax):
    def forward(self, q, k, v, layer_id, batch):
        if batch.num_tokens == 4:
            {fault}
        return super().forward(q, k, v, layer_id, batch)

register(Row(name="odd", kind=AttentionKind.SOFTMAX, create=Odd, source=__file__))
"""
CELLS = Path(__file__).resolve().parents[2] / "matrix" / "test_cells.py"
CASES = ("--case", "page_size_1", "--case", "prefix_exact_page")


def run(tmp_path: Path, fault: str, *arguments: str, device: str = "cpu") -> tuple[int, str, dict[str, tuple[str, str]]]:
    """Exit code, terminal text, and status and reason of each case."""
    plugin, evidence = tmp_path / "odd.py", tmp_path / "e.jsonl"
    plugin.write_text(ROW.format(fault=fault))
    command = [sys.executable, "-m", "attnmatrix.matrix", "run", "--plugin", str(plugin), "--backend", "odd", "--mode", "eager", *CASES]
    command += ["--device", device, "--evidence", str(evidence), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    records = [json.loads(line) for line in evidence.read_text().splitlines()] if evidence.exists() else []
    return done.returncode, done.stdout + done.stderr, {r["case_name"]: (r["status"], r["reason"]) for r in records}


def test_a_hang_ends_at_the_time_limit_and_the_next_cell_runs(tmp_path: Path) -> None:
    code, text, found = run(tmp_path, "time.sleep(200)", "-n", "1", "--time-limit", "30")
    assert code == 1, text
    assert found["page_size_1"] == ("crash", "no result within 30 s; it was in forward (odd.py:26)")
    assert found["prefix_exact_page"][0] == "pass"


def test_a_lost_device_is_a_crash_and_the_next_cell_gets_a_fresh_process(tmp_path: Path) -> None:
    code, text, found = run(tmp_path, "lose_device()", "-n", "1")
    assert code == 1, text
    status, reason = found["page_size_1"]
    assert status == "crash"
    assert "illegal memory access" in reason
    assert found["prefix_exact_page"][0] == "pass"


def test_without_workers_a_lost_device_ends_the_run(tmp_path: Path) -> None:
    code, text, found = run(tmp_path, "lose_device()")
    assert code == 1, text
    assert list(found) == ["page_size_1"]
    assert found["page_size_1"][0] == "crash"
    assert "cells after it were not run" in text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_kernel_that_writes_out_of_bounds_kills_its_own_cell_only(tmp_path: Path) -> None:
    code, text, found = run(tmp_path, "write_out_of_bounds()", "-n", "1", device="cuda")
    assert code == 1, text
    status, reason = found["page_size_1"]
    assert status == "crash"
    assert "illegal memory access" in reason
    assert found["prefix_exact_page"][0] == "pass"


def test_a_cell_that_ends_leaves_no_last_words(tmp_path: Path) -> None:
    with contained("a", "cpu", str(tmp_path), 60):
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
    assert reason_of("a", str(tmp_path), 60) == DIED
    assert device_error("cpu") is None


def test_a_dump_of_threads_names_where_the_cell_was(tmp_path: Path) -> None:
    with contained("a", "cpu", str(tmp_path), 60):
        (file,) = tmp_path.iterdir()
        file.write_text(
            'Timeout (0:01:00)!\nThread 0x1 (most recent call first):\n  File "/x/reader.py", line 5 in read\n\n'
            'Thread 0x2 (most recent call first):\n  File "/x/odd.py", line 26 in forward\n  File "/x/run.py", line 18 in run_and_record\n'
        )
        assert reason_of("a", str(tmp_path), 60) == "no result within 60 s; it was in forward (odd.py:26)"


def test_a_lost_device_outranks_the_exception_it_caused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmatrix.matrix.containment.device_error", lambda device: "gone")
    with pytest.raises(DeviceLost, match="gone"), contained("a", "cuda", None, 60):
        raise ValueError("what the loss caused")


def test_a_run_that_ends_in_an_internal_error_leaves_its_records(tmp_path: Path) -> None:
    evidence = tmp_path / "e.jsonl"
    (tmp_path / "fails_late.py").write_text("def pytest_runtest_logfinish(location):\n    raise RuntimeError('in the runner')\n")
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "attnmatrix.matrix.pytest_plugin", "-p", "fails_late"]
    command += ["--backend", "torch", "--mode", "eager", "--case", "page_size_1.shuffled", "--evidence", str(evidence), str(CELLS)]
    here = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300, env=here)
    assert "INTERNALERROR" in done.stdout + done.stderr
    assert len(evidence.read_text().splitlines()) == 1


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_run_that_is_killed_leaves_its_records(tmp_path: Path, workers: str) -> None:
    (tmp_path / "odd.py").write_text(ROW.format(fault="time.sleep(200)"))
    command = [sys.executable, "-m", "attnmatrix.matrix", "run", "--plugin", str(tmp_path / "odd.py"), "--backend", "odd"]
    command += [
        "--mode",
        "eager",
        "--case",
        "prefix_exact_page",
        "--case",
        "page_size_1",
        "--evidence",
        str(tmp_path / "e.jsonl"),
        "-n",
        workers,
    ]
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        until = time.monotonic() + 120
        while not (left := list(tmp_path.glob("*.unfinished"))) and running.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert not (tmp_path / "e.jsonl").exists()
    assert [record.case_name for record in read_file(left[0])] == ["prefix_exact_page"]


def test_a_run_that_ends_leaves_evidence_alone(tmp_path: Path) -> None:
    _, text, found = run(tmp_path, "pass")
    assert found, text
    assert not list(tmp_path.glob("*.unfinished"))
