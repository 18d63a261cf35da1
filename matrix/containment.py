"""What keeps one cell from taking others with it: a time limit, and a fresh process after an error that a GPU does not recover from.

A worker process (``-n``) that hangs or whose CUDA context is lost ends itself; its last words tell the controlling process why, which
records the cell as ``crash`` and starts another worker for the rest. Without workers there is no limit, and a lost context ends the run.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEFAULT_LIMIT = 900
"""Seconds for one cell: kernels that are compiled on first use take minutes."""
DIED = "the process died while this case ran"


class DeviceLost(Exception):
    """Every later call on the device will fail, and this process has no one to hand over to."""


@contextmanager
def contained(node: str, device: str, folder: str | None, limit: int) -> Iterator[None]:
    """Run one cell, the pytest item ``node``. With a ``folder`` for last words, in a worker, it has ``limit`` seconds.

    Raises DeviceLost, outside of a worker, when the device is of no more use.
    """
    if folder is None:
        try:
            yield
        finally:
            lost = device_error(device)
            if lost is not None:
                raise DeviceLost(lost)
        return
    with _last_words(folder, node).open("w") as words:
        # a thread that needs no interpreter lock: it dumps where every Python thread is and ends the process
        faulthandler.dump_traceback_later(limit, exit=True, file=words)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            lost = device_error(device)
            if lost is not None:
                words.write(_lost(lost))
                words.flush()
                os._exit(1)
    _last_words(folder, node).unlink()


def device_error(device: str) -> str | None:
    """What a device that can no longer be used answers; None when it works. An error that it recovers from was raised before."""
    if device != "cuda":
        return None
    answer = _answer()
    if answer is not None and "out of memory" in answer:  # may be told late, and once; what a device does not recover from, at every call
        answer = _answer()
    return None if answer is None else answer.partition("\n")[0]


def _answer() -> str | None:
    """The error with which the device answers, if any."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return None


def reason_of(node: str, folder: str | None, limit: int) -> str:
    """Why the process that ran ``node`` is gone, from its last words."""
    file = _last_words(folder, node) if folder else None
    text = file.read_text() if file is not None and file.is_file() else ""
    if text.startswith("Timeout"):
        own = next((thread for thread in text.split("\n\n") if " in run_and_record" in thread), "")
        frame = re.search(r'File "([^"]*)", line (\d+) in (\S+)', own)
        at = f"; it was in {frame.group(3)} ({Path(frame.group(1)).name}:{frame.group(2)})" if frame else ""
        return f"no result within {limit} s{at}"
    return text or DIED


def lost_reason(error: DeviceLost) -> str:
    return _lost(str(error))


def _lost(message: str) -> str:
    return f"the device was of no more use after this case: {message}"


def _last_words(folder: str, node: str) -> Path:
    return Path(folder) / f"{hashlib.sha256(node.encode()).hexdigest()[:16]}.txt"
