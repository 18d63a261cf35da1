"""What changed between two sets of evidence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from attnmatrix.matrix.record import Record
from attnmatrix.matrix.status import AS_DECLARED, ORDER


@dataclass(frozen=True)
class Change:
    """One cell whose status differs; ``regression`` when it got worse, went missing, or is met for the first time and is not as declared."""

    backend: str
    mode: str
    case: str
    device: str
    before: str
    after: str

    @property
    def regression(self) -> bool:
        if self.before == "untested":
            return self.after not in AS_DECLARED
        return ORDER.index(self.after) < ORDER.index(self.before) or self.after == "untested"

    def line(self) -> str:
        sign = "WORSE " if self.regression else "      "
        return f"{sign}{self.backend} {self.mode} {self.device}: {self.before} -> {self.after}  {self.case}"

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "regression": self.regression}


def compare_evidence(old: Iterable[Record], new: Iterable[Record]) -> list[Change]:
    """Changes by row, mode, case and device, whatever the package versions; a cell on one side only is ``untested`` on the other."""
    before, after = _by_cell(old), _by_cell(new)
    changes = []
    for cell in sorted(before.keys() | after.keys()):
        was, now = before.get(cell, "untested"), after.get(cell, "untested")
        if was != now:
            changes.append(Change(*cell, before=was, after=now))
    return changes


def devices_left_out(old: Iterable[Record], new: Iterable[Record]) -> list[str]:
    """Devices that only the old evidence has: a run on one machine says nothing about another."""
    return sorted({record.device for record in old} - {record.device for record in new})


def _by_cell(records: Iterable[Record]) -> dict[tuple[str, str, str, str], str]:
    statuses: dict[tuple[str, str, str, str], str] = {}
    for record in sorted(records, key=lambda record: record.utc):
        statuses[record.backend, record.mode, record.case, record.device] = record.status
    return statuses
