"""Records of a run as they arrive, so that a run which is killed leaves what it had; the evidence itself is written at the end, whole."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from attnmatrix.matrix.whole_file import check_place


class Journal:
    """A file of JSON lines beside the evidence to be, one for each run. It is readable as evidence at any time."""

    def __init__(self, evidence: Path) -> None:
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.path = evidence.with_name(f"{evidence.name}.{began}-{os.getpid()}.unfinished")

    def add(self, records: Sequence[str]) -> None:
        """Append encoded records. Raises UsageError when no file can be written there."""
        if not self.path.exists():
            check_place(self.path)
        with self.path.open("ab", buffering=0) as stream:
            stream.write("".join(f"{record}\n" for record in records).encode())

    def remove(self) -> None:
        """The evidence is written: the journal is not needed any more."""
        self.path.unlink(missing_ok=True)
