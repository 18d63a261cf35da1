"""Large cells wait for each other, small ones do not."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.layouts import huge_pools, seed_layouts
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
