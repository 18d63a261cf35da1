"""Cells that take a large part of a GPU's memory, one at a time on each GPU, and nothing kept of it afterwards."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from attnmatrix.cases.case import Case

LARGE = 2**30
"""Elements of one buffer of keys above which a cell waits for its turn."""


def is_large(case: Case) -> bool:
    """Whether one buffer of keys has more than ``LARGE`` elements."""
    return case.spare_pages * case.page_size * case.heads.kv * case.heads.dim > LARGE


@contextmanager
def turn_of(case: Case, device: str, alone: bool = False) -> Iterator[None]:
    """Within the block no other worker on this GPU runs a large case; memory cached for it is given back at the end. A CPU does not wait, nor do
    small cases, unless they are to be ``alone`` with others of their size. Processes that see other GPUs (``CUDA_VISIBLE_DEVICES``) do not
    wait for each other."""
    if device != "cuda" or not (alone or is_large(case)):
        yield
        return
    gpus = "".join(char if char.isalnum() else "-" for char in os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    with open(Path(tempfile.gettempdir()) / f"attnmatrix-{os.getuid()}-gpu-{gpus}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            gc.collect()
            torch.cuda.empty_cache()
