"""Where a run happens: device, versions, revision."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from attnmatrix.harness.registry import Row, UsageError

ROOT = Path(__file__).resolve().parent
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
"""Read when numpy is loaded, which torch does, so it stands beside what first asks for torch; workers inherit it. Interpreted kernels
multiply small matrices in numpy: a second thread costs more than it gives, with busy cores a hundred times more, and changes the rounding."""


@dataclass(frozen=True)
class Environment:
    """Facts of one run that every record carries."""

    device: str
    capability: str
    driver: str
    python: str
    torch: str
    triton: str
    revision: str
    dirty: bool

    def stamp(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @staticmethod
    def now() -> str:
        return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def has_cuda() -> bool:
    """Whether a CUDA device can be used here; asks the driver through torch."""
    import torch

    return torch.cuda.is_available()


def resolve_device(name: str | None) -> str:
    """``cpu`` or ``cuda``; None picks CUDA where there is one. Raises UsageError when it is not there."""
    if name is None:
        return "cuda" if has_cuda() else "cpu"
    if name not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {name!r}; known: cpu, cuda")
    if name == "cuda" and not has_cuda():
        raise UsageError("device 'cuda' was asked for, but torch finds no CUDA device")
    return name


@functools.cache
def environment(device: str) -> Environment:
    """The environment of this process for ``cpu`` or ``cuda``."""
    import torch

    name, capability, driver = "cpu", "", ""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        driver = _driver()
    revision, dirty = _revision()
    return Environment(name, capability, driver, platform.python_version(), str(torch.__version__), _version("triton"), revision, dirty)


def row_versions(row: Row) -> dict[str, str]:
    """Installed versions of the distributions a row needs, torch included."""
    return {name: _version(name) for name in sorted({*row.distributions, "torch"})}


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _driver() -> str:
    return _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]


def _revision() -> tuple[str, bool]:
    """Commit and whether the tree differs from it: as ``ATTNMATRIX_REVISION`` says, for code that travels without its repository or with an
    older one, else as git does."""
    stated = os.environ.get("ATTNMATRIX_REVISION", "")
    if stated:
        return stated, False
    revision = _run("git", "rev-parse", "--short=12", "HEAD")
    return revision or "unknown", not revision or bool(_run("git", "status", "--porcelain", "--untracked-files=no"))
