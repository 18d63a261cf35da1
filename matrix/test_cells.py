"""The cells: one pytest item per row, runner mode and case, ``test_cell[row-mode-caseid]``."""

from __future__ import annotations

import pytest

from attnmatrix.matrix.containment import DeviceLost, contained, lost_reason
from attnmatrix.matrix.environment import environment
from attnmatrix.matrix.pytest_plugin import LAST_WORDS, RECORD_KEY
from attnmatrix.matrix.run import crash_record, run_and_record
from attnmatrix.matrix.selection import CellId
from attnmatrix.matrix.status import AS_DECLARED


def test_cell(cell: CellId, cell_device: str, request: pytest.FixtureRequest) -> None:
    """Run one cell and keep its record; anything but what the row declares fails."""
    folder = getattr(request.config, "workerinput", {}).get(LAST_WORDS)
    environment(cell_device)  # asks the device while it answers
    try:
        with contained(request.node.nodeid, cell_device, folder, request.config.getoption("--time-limit")):
            record = run_and_record(cell, cell_device, request.config.getoption("--full"))
    except DeviceLost as error:
        record = crash_record(cell, cell_device, lost_reason(error))
        request.session.shouldfail = f"{record.reason}; cells after it were not run (use -n 1 to run each after a crash in a fresh process)"
    except SystemExit as error:
        record = crash_record(cell, cell_device, f"the backend asked the process to end: sys.exit({error.code!r})")
    request.node.user_properties.append(RECORD_KEY.pair(record))
    if record.status not in AS_DECLARED:
        from attnmatrix.matrix.explain import failure_message

        pytest.fail(failure_message(record, request.config.getoption("--plugin")), pytrace=False)
