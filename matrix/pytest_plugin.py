"""The pytest plugin: options, collection of cells, records from workers, evidence at the end, a summary in the terminal."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnmatrix.harness.registry import UsageError
from attnmatrix.matrix.containment import DEFAULT_LIMIT, reason_of
from attnmatrix.matrix.environment import resolve_device
from attnmatrix.matrix.journal import Journal
from attnmatrix.matrix.selection import CellId, Selection

TOP = Path(__file__).resolve().parent.parent
OURS = tuple(TOP / name for name in ("cases", "references", "harness", "matrix"))


class _RecordKey:
    """How a record travels in a report's user properties, through worker processes too."""

    name = "attnmatrix-record"

    def pair(self, record: Any) -> tuple[str, str]:
        text = msgspec.json.encode(record)
        msgspec.json.decode(text, type=type(record))  # a record that cannot be read back must fail here, not when all are gathered
        return self.name, text.decode()


RECORD_KEY = _RecordKey()
LAST_WORDS = "attnmatrix-last-words"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attnmatrix", "attention capability matrix")
    group.addoption("--backend", action="append", default=[], metavar="B", help="only this row, or pair 'prefill,decode' (repeatable)")
    group.addoption("--mode", action="append", default=[], metavar="M", help="only this runner mode (repeatable)")
    group.addoption("--case", action="append", default=[], metavar="ID", help="only this case, by id or name (repeatable)")
    group.addoption("--device", default=None, metavar="D", help="cpu or cuda (default: cuda where there is one)")
    group.addoption("--full", action="store_true", help="on a CPU too, graph modes and the rows that are sampled there run every case")
    group.addoption("--missing-from", default=None, metavar="EVIDENCE", help="only cells that this evidence has no record of")
    group.addoption("--evidence", default=None, metavar="FILE", help="write the run's records to FILE (JSON lines)")
    group.addoption(
        "--time-limit", type=int, default=DEFAULT_LIMIT, metavar="S", help="seconds after which a cell in a worker (-n) ends as crash"
    )
    group.addoption("--plugin", action="append", default=[], metavar="FILE", help="load rows from a Python file (repeatable)")


def selection(config: pytest.Config) -> Selection:
    """The cells that the command line asks for. Raises UsageError for a name that does not exist."""
    option = config.getoption
    return Selection(
        backends=tuple(option("--backend")),
        modes=tuple(option("--mode")),
        cases=tuple(option("--case")),
        device=resolve_device(option("--device")),
        full=bool(option("--full")),
        plugins=tuple(option("--plugin")),
    )


def chosen_cells(config: pytest.Config) -> tuple[CellId, ...]:
    """The cells of the selection, less those recorded in ``--missing-from``. Raises UsageError."""
    chosen, recorded = selection(config), config.getoption("--missing-from")
    if recorded is None:
        return chosen.cells()
    from attnmatrix.matrix.recorded import without_recorded

    return without_recorded(chosen.cells(), Path(recorded), chosen.device)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Records(config), "attnmatrix-records")


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Our packages are imported as ``attnmatrix.*`` only; pytest must not import their ``__init__`` under a bare name."""
    return pytest.Dir.from_parent(parent, path=path) if path in OURS else None


class _CellsModule(pytest.Module):
    """``matrix/test_cells.py`` under its real name."""

    def _getobj(self) -> Any:
        return importlib.import_module("attnmatrix.matrix.test_cells")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path == TOP / "matrix" / "test_cells.py":
        return _CellsModule.from_parent(parent, path=module_path)  # type: ignore[no-any-return]
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames and metafunc.function.__module__ == "attnmatrix.matrix.test_cells":
        try:
            cells = chosen_cells(metafunc.config)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from error
        metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells])


@pytest.fixture(scope="session")
def cell_device(request: pytest.FixtureRequest) -> str:
    """``cpu`` or ``cuda``."""
    return resolve_device(request.config.getoption("--device"))


class Records:
    """Gathers the records of a session on its controlling process."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.is_worker = hasattr(config, "workerinput")
        self.encoded: list[str] = []
        self.crashed: list[str] = []
        self.last_words: tempfile.TemporaryDirectory[str] | None = None
        path = config.getoption("--evidence")
        self.journal = Journal(Path(path)) if path and not self.is_worker else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker where to leave its last words."""
        if self.last_words is None:
            self.last_words = tempfile.TemporaryDirectory(prefix="attnmatrix-")
        node.workerinput[LAST_WORDS] = self.last_words.name

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and not self.is_worker:
            arrived = [str(value) for name, value in report.user_properties if name == RECORD_KEY.name]
            self.encoded += arrived
            if self.journal and arrived:
                self.journal.add(arrived)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self.crashed.append(crashitem)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Write the evidence, however the session ended: an internal error has no summary."""
        if self.journal and (self.encoded or self.crashed):
            from attnmatrix.matrix.evidence_file import write

            write(Path(self.config.getoption("--evidence")), self.all_records())
            self.journal.remove()

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None, object, object]:
        records = self.all_records()
        path = self.config.getoption("--evidence")
        if records:
            from attnmatrix.matrix.summary import summary_lines

            terminalreporter.section("capability matrix")
            for line in (*summary_lines(records), *selection(self.config).not_run()):
                terminalreporter.write_line(line)
            if path:
                terminalreporter.write_line(f"{len(records)} records written to {path}")
        return (yield)

    def all_records(self) -> list[Any]:
        """Records of all cells that ran, those whose process died included."""
        if self.is_worker or not (self.encoded or self.crashed):
            return []
        from attnmatrix.matrix.record import Record
        from attnmatrix.matrix.run import crash_record

        records = [msgspec.json.decode(text, type=Record) for text in self.encoded]
        if self.crashed:
            chosen = selection(self.config)
            by_id: dict[str, CellId] = {cell.id: cell for cell in chosen.cells()}
            folder, limit = self.last_words.name if self.last_words else None, self.config.getoption("--time-limit")
            names = {item: item.partition("[")[2].removesuffix("]") for item in self.crashed}
            records += [
                crash_record(by_id[name], chosen.device, reason_of(item, folder, limit)) for item, name in names.items() if name in by_id
            ]
        return records
