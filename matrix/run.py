"""Running one cell and making its record."""

from __future__ import annotations

import re
from functools import cache

import torch

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.registry import Row, UsageError, find_row
from attnmatrix.matrix.environment import environment, row_versions
from attnmatrix.matrix.fingerprint import INTERPRETER, ROUNDING, TOP, fingerprint
from attnmatrix.matrix.record import Record, make_crash_record, make_record
from attnmatrix.matrix.selection import CellId
from attnmatrix.matrix.turns import turn_of

FURTHER_TRIES = 2
_OUT_OF_MEMORY = re.compile("out of memory|CUBLAS_STATUS_ALLOC_FAILED")


def run_and_record(cell: CellId, device: str, full: bool = False) -> Record:
    """Drive the cell on ``cpu`` or ``cuda`` and describe the outcome. One that failed for want of a GPU's memory says nothing about its row, since
    others use that GPU: it is run again while no large case is."""
    torch.set_num_threads(1)
    for tried in range(1 + FURTHER_TRIES):
        with turn_of(cell.case, device, alone=tried > 0):
            result = run_cell(cell.row, cell.mode, cell.case, torch.device(device), full=full)
        if device != "cuda" or result.status != "fail" or not _OUT_OF_MEMORY.search(result.reason):
            break
    return make_record(result, cell.row.kind, row_versions(cell.row), environment(device), cell_fingerprint(cell.row, cell.mode, device))


def crash_record(cell: CellId, device: str, reason: str) -> Record:
    """The record of a cell that took its process with it."""
    where = environment(device)
    return make_crash_record(
        cell.row.name,
        cell.mode,
        cell.case,
        cell.row.kind,
        row_versions(cell.row),
        where,
        cell_fingerprint(cell.row, cell.mode, device),
        reason,
    )


def cell_fingerprint(row: Row, mode: RunnerMode, device: str) -> str:
    """Hash of the code that a verdict about this row in this mode on a ``device`` type depends on; models of rounding steps count where the row
    names one, Triton's interpreter where it runs."""
    names = (
        *(ROUNDING[row.kind] if row.conventions.rounding else ()),
        *(INTERPRETER if row.interpreted and device == "cpu" else ()),
    )
    return fingerprint(row.kind, mode, (row.source, *row.more_sources, *(str(TOP / "harness" / f"{name}.py") for name in names)))


@cache
def current_fingerprint(kind: AttentionKind, backend: str, mode: RunnerMode, device: str) -> str | None:
    """The present hash for a row or a pair by name, to tell which records are stale; None where none of that name is known here."""
    try:
        return cell_fingerprint(find_row(backend, kind), mode, device)
    except UsageError:
        return None
