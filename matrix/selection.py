"""Which cells a run covers: rows, modes and cases picked by name, and what this machine cannot run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.suites import drives, gpu_suite, modes_of
from attnmatrix.harness import backends
from attnmatrix.harness.adapted_modes import ADAPTED_MODES
from attnmatrix.harness.choose import Place, chosen_rows
from attnmatrix.harness.registry import Row, UsageError, find_rows, load_plugin, rows
from attnmatrix.harness.row_check import claim_problem
from attnmatrix.harness.row_suite import in_dtypes_of, row_suite

BACKENDS = Path(backends.__file__).parent
MOST_NAMES = 8  # in a message


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
        """All cells selected that this machine can run. Raises UsageError for a name that does not exist, a mode that is named and has no
        adapter, a case that is named and that none of the rows and modes takes, and a row whose claims about a cell cannot be checked."""
        chosen, modes, cases = self.rows(), parse_modes(self.modes), self._cases()
        if self.modes:
            require_adapters(modes)
        self._require_takers(chosen, modes, cases)
        found: list[CellId] = []
        for row in chosen:
            if self.device not in row.devices or row.missing:
                continue
            self._require_claims(row, modes, cases)
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

    def _require_takers(self, chosen: Sequence[Row], modes: Sequence[RunnerMode], cases: Sequence[Case]) -> None:
        kinds = {row.kind for row in chosen}
        for text in self.cases:
            found = find_cases(text)
            if not kinds & {case.kind for case in found}:
                raise UsageError(f"case {text!r} is one of {found[0].kind.value} attention, which no chosen row has")
            able = [mode for mode in RunnerMode if mode in ADAPTED_MODES and any(drives(mode, case) for case in found)]
            if not able:
                raise UsageError(f"case {text!r} is driven by no mode that has an adapter yet")
            if not set(able) & set(modes):
                raise UsageError(f"case {text!r} is driven by {', '.join(mode.value for mode in able)}, not by the chosen modes")

    def _require_claims(self, row: Row, modes: Sequence[RunnerMode], cases: Sequence[Case]) -> None:
        """A row from elsewhere is asked about every case that it may be given; a test asks the rows of this repository."""
        if Path(row.source).is_relative_to(BACKENDS):
            return
        for mode in modes:
            if mode not in ADAPTED_MODES:
                continue
            for case in cases or gpu_suite(row.kind, mode):
                problem = claim_problem(row, mode, case, self.device) if case.kind is row.kind and drives(mode, case) else None
                if problem:
                    raise UsageError(f"backend {row.name!r}: {problem}")

    def _cases(self) -> tuple[Case, ...]:
        return tuple(case for text in self.cases for case in find_cases(text))

    def _cases_of(self, row: Row, mode: RunnerMode, cases: Sequence[Case]) -> tuple[Case, ...]:
        if cases:
            chosen = tuple(case for case in cases if case.kind is row.kind and drives(mode, case))
        else:
            chosen = row_suite(row, mode, self.device, self.full)
        return in_dtypes_of(row, chosen)


def parse_modes(names: Sequence[str]) -> tuple[RunnerMode, ...]:
    """Runner modes by id, all when none is named. Raises UsageError naming the known ones."""
    known = {mode.value: mode for mode in RunnerMode}
    for name in names:
        if name not in known:
            raise UsageError(f"unknown mode {name!r}; known: {', '.join(known)}")
    return tuple(known[name] for name in names) or tuple(RunnerMode)


def require_adapters(modes: Sequence[RunnerMode]) -> None:
    """Raises UsageError for a mode that nothing drives yet."""
    for mode in modes:
        if mode not in ADAPTED_MODES:
            known = ", ".join(mode.value for mode in RunnerMode if mode in ADAPTED_MODES)
            raise UsageError(f"mode {mode.value!r} has no adapter yet; modes that have one: {known}")


def explained_mode(case: Case, name: str | None) -> RunnerMode:
    """The mode called ``name``, by default the first, that drives a case. Raises UsageError when it does not, naming those that do."""
    able = modes_of(case)
    chosen = parse_modes((name,))[0] if name else next(iter(able), None)
    if chosen is None or chosen not in able:
        known = ", ".join(mode.value for mode in able) or "none"
        raise UsageError(f"case {case.id} is not driven by mode {name or 'any'}; modes that drive it: {known}")
    return chosen


def find_cases(text: str) -> tuple[Case, ...]:
    """The case with this id, or the suite cases of any kind with this name. Raises UsageError when there is neither, with names like it."""
    known = [case for kind in AttentionKind for mode in RunnerMode for case in gpu_suite(kind, mode)]
    named = {case.id: case for case in known if text in (case.name, case.id)}
    if text and named:
        return tuple(named.values())
    try:
        return (parse_case(text),)
    except ValueError as error:
        raise UsageError(f"{error}{_names_like(text, {case.name for case in known if case.name})}") from error


def _names_like(text: str, names: Collection[str]) -> str:
    """What to add to a complaint about ``text``: the names that it is a part of, else those that are spelt nearly so, else where names are."""
    part_of = sorted((name for name in names if text and text in name), key=lambda name: (not name.startswith(text), name))
    like = part_of or get_close_matches(text, names, n=MOST_NAMES)
    more = f" and {len(like) - MOST_NAMES} more" if len(like) > MOST_NAMES else ""
    return f"; names like it: {', '.join(like[:MOST_NAMES])}{more}" if like else "; known ids and names: attnmatrix list cases"


def row_and_case(backend: str, text: str) -> tuple[Row, Case]:
    """The row of this name and the case of its kind. Raises UsageError when there is no such row or case, or they are of different kinds."""
    found, cases = find_rows(backend), find_cases(text)
    for row in found:
        for case in cases:
            if row.kind is case.kind:
                return row, case
    raise UsageError(f"backend {backend!r} has no {cases[0].kind.value} row, which case {text!r} needs")
