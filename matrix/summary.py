"""The matrix as a terminal shows it at the end of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from tabulate import tabulate

from attnmatrix.cases.modes import RunnerMode
from attnmatrix.matrix.record import Record
from attnmatrix.matrix.status import ORDER


def summary_lines(records: Sequence[Record]) -> list[str]:
    """One table: rows x the modes that ran, each cell the counts of its statuses."""
    cells: dict[tuple[str, str], dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for record in records:
        cells[record.kind, record.backend][record.mode][record.status] += 1
    modes = [mode for mode in RunnerMode if any(mode.value in row for row in cells.values())]
    rows = [
        [kind, name, *(" ".join(f"{counts[s]} {s}" for s in ORDER if s in (counts := row.get(mode.value, Counter()))) for mode in modes)]
        for (kind, name), row in sorted(cells.items(), key=lambda item: (item[0][0] != "softmax", item[0]))
    ]
    return tabulate(rows, headers=["kind", "row", *(mode.column for mode in modes)]).splitlines()
