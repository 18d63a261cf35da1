"""Large cells wait for each other, small ones do not."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.layouts import huge_pools, seed_layouts
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.cell import CellResult
from attnmatrix.harness.registry import find_row
from attnmatrix.matrix import run
from attnmatrix.matrix.containment import device_error
from attnmatrix.matrix.environment import environment
from attnmatrix.matrix.selection import CellId
from attnmatrix.matrix.turns import is_large, turn_of

HUGE = huge_pools()[0]
SMALL = seed_layouts(AttentionKind.SOFTMAX)[0]


def test_only_huge_pools_are_large() -> None:
    assert all(is_large(case) for case in huge_pools())
    assert not any(is_large(case) for case in seed_layouts(AttentionKind.SOFTMAX))


def _meet(case: Case, folder: str, barrier: Barrier, wait: float, met: multiprocessing.Queue[bool]) -> None:
    tempfile.tempdir = folder
    with turn_of(case, "cuda"):
        try:
            barrier.wait(wait)
            met.put(True)
        except threading.BrokenBarrierError:
            met.put(False)


@pytest.mark.parametrize(("case", "wait", "together"), [(HUGE, 0.5, False), (SMALL, 60.0, True)])
def test_two_workers(case: Case, wait: float, together: bool, tmp_path: Path) -> None:
    """Two workers can meet inside only when neither waits for the other to leave."""
    context = multiprocessing.get_context("fork")
    met: multiprocessing.Queue[bool] = context.Queue()
    barrier = context.Barrier(2)
    workers = [context.Process(target=_meet, args=(case, str(tmp_path), barrier, wait, met)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [met.get(timeout=120) for _ in workers] == [together] * 2


def test_cached_memory_is_given_back_whatever_happened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    with pytest.raises(RuntimeError), turn_of(HUGE, "cuda"):
        raise RuntimeError
    assert given_back == [True]


def _result(status: str, reason: str) -> CellResult:
    return CellResult("torch", RunnerMode.EAGER, SMALL, status, reason)


def _recorded(results: list[CellResult], device: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[bool]]:
    """The status recorded when a cell's runs come out as given, and whether it was alone in each."""
    turns: list[bool] = []

    @contextmanager
    def turn(case: Case, device: str, alone: bool = False) -> Iterator[None]:
        turns.append(alone)
        yield

    left = list(results)
    monkeypatch.setattr(run, "turn_of", turn)
    monkeypatch.setattr(run, "run_cell", lambda *args, **options: left.pop(0))
    monkeypatch.setattr(run, "environment", lambda device: environment("cpu"))
    cell = CellId(find_row("torch", AttentionKind.SOFTMAX), RunnerMode.EAGER, SMALL)
    return run.run_and_record(cell, device).status, turns


WANT = ("OutOfMemoryError at model.py:43: CUDA out of memory. Tried to allocate", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")


@pytest.mark.parametrize("reason", WANT)
def test_a_cell_that_lacked_memory_runs_again_beside_no_large_one(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _recorded([_result("fail", reason), _result("pass", "")], "cuda", monkeypatch) == ("pass", [False, True])


def test_a_cell_that_lacks_memory_each_time_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _recorded([_result("fail", WANT[0])] * 3, "cuda", monkeypatch) == ("fail", [False, True, True])


def test_no_other_failure_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _recorded([_result("fail", "out of layer 0, step 0: error 0.5")], "cuda", monkeypatch) == ("fail", [False])
    assert _recorded([_result("fail", WANT[0])], "cpu", monkeypatch) == ("fail", [False])


@pytest.mark.parametrize(
    ("answers", "lost"),
    [
        ([], None),
        (["CUDA error: out of memory\nmore"], None),
        (["CUDA error: out of memory\nmore"] * 2, "CUDA error: out of memory"),
        (["CUDA error: an illegal memory access was encountered\nmore"] * 2, "CUDA error: an illegal memory access was encountered"),
    ],
)
def test_a_device_that_lacked_memory_once_is_not_lost(answers: list[str], lost: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    left = list(answers)

    def synchronize() -> None:
        if left:
            raise RuntimeError(left.pop(0))

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert device_error("cuda") == lost
