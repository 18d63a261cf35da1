"""Outcomes of long measurements, kept beside the evidence as JSON: one struct or a table of them a file."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from attnmatrix.harness.registry import UsageError
from attnmatrix.matrix.whole_file import write_whole

T = TypeVar("T")


def read_kept(path: Path, kind: type[T]) -> T:
    """What :func:`keep` wrote. Raises UsageError when the file cannot be read as ``kind``."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}") from error


def keep(path: Path, value: object) -> None:
    """Write ``value`` with sorted keys, so that equal values make equal files; whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=1) + b"\n")
