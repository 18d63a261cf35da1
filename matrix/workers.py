"""Worker processes for measurements of the judgement itself: fresh ones, each with one thread."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch


def worker_pool(workers: int) -> ProcessPoolExecutor:
    """``workers`` processes, at least one."""
    return ProcessPoolExecutor(max(1, workers), mp_context=get_context("spawn"), initializer=_one_thread)


def _one_thread() -> None:
    torch.set_num_threads(1)
