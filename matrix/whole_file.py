"""Files that a reader sees whole, old or new, never in part; and where a file can be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from attnmatrix.harness.registry import UsageError


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file at ``path``, or the one that a link there leads to, by one with this content; a failure leaves the old file and
    nothing else. Raises UsageError when it cannot."""
    path = path.resolve()
    handle, temporary = _part_of(path)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def check_place(path: Path) -> None:
    """Make the folder of a file to write; called before a long run, not after it. Raises UsageError when no file can be written there."""
    handle, temporary = _part_of(path.resolve())
    os.close(handle)
    os.unlink(temporary)


def _part_of(path: Path) -> tuple[int, str]:
    """Descriptor and name of a new file beside ``path``, whose folder is made. Raises UsageError."""
    if path.is_dir():
        raise UsageError(f"cannot write {str(path)!r}: it is a folder, expected a file")
    if path.exists() and not path.is_file():
        raise UsageError(f"cannot write {str(path)!r}: it is a device, a pipe or a socket, expected a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror}") from error
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write {str(path)!r}: its folder is read-only")
    try:
        return tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: no file can be made in its folder ({error.strerror})") from error
