"""The cells: one pytest item per row, runner mode and case, ``test_cell[row-mode-caseid]``."""

from __future__ import annotations

import pytest

from attnmatrix.matrix.pytest_plugin import RECORD_KEY
from attnmatrix.matrix.run import run_and_record
from attnmatrix.matrix.selection import CellId
from attnmatrix.matrix.status import AS_DECLARED


def test_cell(cell: CellId, cell_device: str, request: pytest.FixtureRequest) -> None:
    """Run one cell and keep its record; anything but what the row declares fails."""
    record = run_and_record(cell, cell_device, request.config.getoption("--full"))
    request.node.user_properties.append(RECORD_KEY.pair(record))
    if record.status not in AS_DECLARED:
        from attnmatrix.matrix.explain import failure_message

        pytest.fail(failure_message(record), pytrace=False)
