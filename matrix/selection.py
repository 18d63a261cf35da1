"""Which cells a run covers: rows, modes and cases picked by name, and what this machine cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.suites import gpu_suite
from attnmatrix.harness.adapted_modes import ADAPTED_MODES
from attnmatrix.harness.choose import Place, chosen_rows
from attnmatrix.harness.registry import Row, UsageError, load_plugin, rows
from attnmatrix.harness.row_suite import row_suite


@dataclass(frozen=True)
class CellId:
    """One pytest item: a row in one mode on one case."""

    row: Row
    mode: RunnerMode
    case: Case

    @property
    def id(self) -> str:
        return f"{self.row.name}-{self.mode.value}-{self.case.id}"


@dataclass(frozen=True)
class Selection:
    """What the user asked for; empty fields mean everything."""

    backends: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    device: str = "cpu"
    full: bool = False
    plugins: tuple[str, ...] = ()

    def cells(self) -> tuple[CellId, ...]:
        """All cells selected that this machine can run. Raises UsageError for a name that does not exist."""
        chosen, modes, cases = self.rows(), parse_modes(self.modes), self._cases()
        found: list[CellId] = []
        for row in chosen:
            if self.device not in row.devices or row.missing:
                continue
            for mode in modes:
                if mode in ADAPTED_MODES:
                    found += [CellId(row, mode, case) for case in self._cases_of(row, mode, cases)]
        return tuple({cell.id: cell for cell in found}.values())

    def rows(self) -> tuple[Row, ...]:
        """The rows asked for; an alias is replaced by what it stands for on the device."""
        for plugin in self.plugins:
            load_plugin(plugin)
        if not self.backends:
            return rows()
        place = Place(self.device)
        return tuple({(row.name, row.kind, row.dtypes): row for name in self.backends for row in chosen_rows(name, place)}.values())

    def not_run(self) -> tuple[str, ...]:
        """One line for each selected row that this machine cannot run."""
        lines = []
        for row in self.rows():
            if row.missing:
                lines.append(f"{row.name} ({row.kind.value}): untested, {', '.join(row.missing)} not installed")
            elif self.device not in row.devices:
                lines.append(f"{row.name} ({row.kind.value}): untested, needs {' or '.join(row.devices)}")
        return tuple(lines)

    def _cases(self) -> tuple[Case, ...]:
        return tuple(case for text in self.cases for case in find_cases(text))

    def _cases_of(self, row: Row, mode: RunnerMode, cases: Sequence[Case]) -> tuple[Case, ...]:
        if cases:
            chosen = tuple(case for case in cases if case.kind is row.kind and case.forward in mode.forward_modes)
        else:
            chosen = row_suite(row, mode, self.device, self.full)
        return tuple(case for case in chosen if row.dtypes is None or case.dtype in row.dtypes)


def parse_modes(names: Sequence[str]) -> tuple[RunnerMode, ...]:
    """Runner modes by id, all when none is named. Raises UsageError naming the known ones."""
    known = {mode.value: mode for mode in RunnerMode}
    for name in names:
        if name not in known:
            raise UsageError(f"unknown mode {name!r}; known: {', '.join(known)}")
    return tuple(known[name] for name in names) or tuple(RunnerMode)


def find_cases(text: str) -> tuple[Case, ...]:
    """The case with this id, or the suite cases of any kind with this name. Raises UsageError when there is neither."""
    named = {c.id: c for kind in AttentionKind for mode in RunnerMode for c in gpu_suite(kind, mode) if text in (c.name, c.id)}
    if named:
        return tuple(named.values())
    try:
        return (parse_case(text),)
    except ValueError as error:
        raise UsageError(str(error)) from error
