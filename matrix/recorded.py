"""Cells that evidence has a record of already, so that a run which was cut short can go on where it ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attnmatrix.matrix.environment import environment, row_versions
from attnmatrix.matrix.evidence_file import read
from attnmatrix.matrix.run import cell_fingerprint
from attnmatrix.matrix.selection import CellId


def without_recorded(cells: Sequence[CellId], evidence: Path, device: str) -> tuple[CellId, ...]:
    """The cells of which ``evidence``, a file or folder, has no record of this code, these package versions and this device.

    ``device`` is ``cpu`` or ``cuda``. Whatever the recorded status: a cell that failed was run. Raises UsageError for evidence that cannot
    be read.
    """
    here = environment(device)
    recorded = {
        (record.kind, record.backend, record.mode, record.case_hash, record.fingerprint, tuple(sorted(record.versions.items())))
        for record in read(evidence)
        if (record.device, record.capability) == (here.device, here.capability)
    }
    return tuple(cell for cell in cells if _key(cell, device) not in recorded)


def _key(cell: CellId, device: str) -> tuple[object, ...]:
    row, mode = cell.row, cell.mode
    versions = tuple(sorted(row_versions(row).items()))
    return row.kind.value, row.name, mode.value, cell.case.content_hash, cell_fingerprint(row, mode, device), versions
