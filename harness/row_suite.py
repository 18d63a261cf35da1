"""Which cases make up a row's cell on a device.

Triton kernels in the interpreter run thousands of times slower than on a GPU. There, and only by default, a cell is sampled: a
pairwise-covering subset of its suite, in float32 (exact: a right kernel errs by rounding units, a wrong index shows). ``full`` runs everything.
"""

from __future__ import annotations

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.pairwise import pairwise_subset
from attnmatrix.cases.suites import suite
from attnmatrix.harness.registry import Row


def is_sampled(row: Row, device: str, full: bool) -> bool:
    """Whether a row's cells are sampled: interpreted kernels on a CPU, unless everything was asked for."""
    return row.interpreted and device == "cpu" and not full


def row_suite(row: Row, mode: RunnerMode, device: str, full: bool) -> tuple[Case, ...]:
    """The cases of one cell on a ``device`` type."""
    whole = suite(row.kind, mode)
    if not (row.interpreted and device == "cpu"):
        return whole
    exact = tuple({case.id: case for case in (_exact(case) for case in whole)}.values())
    return pairwise_subset(exact) if is_sampled(row, device, full) else tuple({c.id: c for c in (*whole, *exact)}.values())


def _exact(case: Case) -> Case:
    """A bf16 case in float32; the suite's own dtype variants stay."""
    return case.but(dtype="fp32", name=case.name) if case.dtype == "bf16" and not case.name.startswith("bf16") else case
