"""In which cells requests take over places of others: in every cell somewhere, and everywhere on a GPU or when everything is asked for."""

from __future__ import annotations

import pytest

from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import RECYCLED
from attnmatrix.harness.adapted_modes import ADAPTED_MODES
from attnmatrix.harness.capabilities import Supported
from attnmatrix.harness.coverage import share_of
from attnmatrix.harness.registry import Row, rows
from attnmatrix.harness.row_suite import row_suite

ROWS = [row for row in rows() if "cpu" in row.devices]


def kinds(row: Row, mode: RunnerMode, device: str, full: bool) -> dict[str, set[str]]:
    """By kind of batch: what is taken over in the cases that the row should pass."""
    found: dict[str, set[str]] = {}
    for case in row_suite(row, mode, device, full):
        right = isinstance(row.capabilities.claim(mode, case, device), Supported) and row.capabilities.known_fault(mode, case) is None
        if right and case.num_tokens and not case.story:
            share = share_of(row, mode, case, device, full)
            found.setdefault(case.forward.value, set()).update(probe.recycled for probe in share.probes)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{row.kind.value}")
def test_every_cell_has_a_case_of_each_kind_of_batch(row: Row) -> None:
    for mode in ADAPTED_MODES - {RunnerMode.HANDOFF}:
        for forward, taken in kinds(row, mode, "cpu", False).items():
            assert taken & set(RECYCLED), (mode, forward)
    eager = kinds(row, RunnerMode.EAGER, "cpu", False)
    assert set(RECYCLED) <= set().union(*eager.values())


def test_on_a_gpu_and_when_everything_is_asked_for_every_case_has_it() -> None:
    for row in ROWS[:2]:
        for device, full in (("cuda", False), ("cpu", True)):
            for mode in (RunnerMode.EAGER, RunnerMode.PCG_EXTEND):
                shares = [share_of(row, mode, case, device, full) for case in row_suite(row, mode, device, full)]
                assert all(probe.recycled for share in shares for probe in share.probes)
