"""The rows by name: built-in files, entry points and plugin files."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import pkgutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from attnmatrix.cases.case import AttentionKind
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.capabilities import Capabilities, Claims, Conventions
from attnmatrix.harness.context import Context
from attnmatrix.harness.row_check import row_problem

ENTRY_POINT_GROUP = "attnmatrix.backends"
ALIASES = {"fa": ("fa3", "fa4", "fa2")}
"""Names that stand for the first of some rows that can run; see ``choose``."""
AUTO = "auto"
"""The name that stands for the row or pair that suits the device and the dtype; see ``choose``."""


class UsageError(ValueError):
    """The user named something that does not exist or cannot be read; the message says what is known."""


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution as its metadata spells it, None when it is absent."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_distributions() -> tuple[str, ...]:
    """torch and, where it is installed, Triton: it comes with torch for GPUs, whose compiler raises in the one or the other."""
    return ("torch", "triton") if installed_version("triton") else ("torch",)


@dataclass(frozen=True, eq=False)
class Row:
    """One row of one kind's table; a package that implements two kinds registers two rows under one name.

    ``create`` builds the backend and imports its package. ``distributions`` are the installed distributions it needs
    (absent: untested) and whose refusals count; by default torch's. ``devices`` are ``cpu`` and/or ``cuda``;
    ``interpreted`` marks Triton kernels that run in the interpreter on a CPU, ``slow_on_cpu`` others that are made to be compiled for a
    GPU; both are sampled there (see ``row_suite``), and so, more sparsely, is a row with ``few_on_cpu``: it runs another row's kernels, or on a CPU
    not those of a GPU. ``dtypes`` None: all; else its cells are those of the cases in these dtypes.
    """

    name: str
    kind: AttentionKind
    create: Callable[[Context], AttentionBackend]
    capabilities: Claims = field(default_factory=Capabilities)
    conventions: Conventions = field(default_factory=Conventions)
    distributions: tuple[str, ...] = field(default_factory=torch_distributions)
    devices: tuple[str, ...] = ("cpu", "cuda")
    interpreted: bool = False
    slow_on_cpu: bool = False
    few_on_cpu: bool = False
    dtypes: tuple[str, ...] | None = None
    summary: str = ""
    snippet: str = ""  # stand-alone code that defines ``attend`` for ``attnmatrix repro``; see matrix/repro_*.py.j2 for its arguments
    source: str = ""
    more_sources: tuple[str, ...] = ()  # files beside its own: of a pair's other side, or shared with other rows

    def version(self, distribution: str) -> str | None:
        """Installed version, or None when the distribution is absent."""
        return installed_version(distribution)

    @property
    def missing(self) -> tuple[str, ...]:
        """The distributions it needs that are not installed."""
        return tuple(name for name in self.distributions if self.version(name) is None)


_ROWS: dict[tuple[str, AttentionKind], Row] = {}


def register(row: Row) -> Row:
    """Add a row. Raises UsageError for a declaration that :func:`row_problem` rejects and for a name that is taken for the row's kind, or
    for what the machine decides."""
    problem = row_problem(row)
    if problem:
        raise UsageError(f"backend {row.name!r}: {problem}")
    if row.name in (*ALIASES, AUTO):
        raise UsageError(f"backend {row.name!r}: this name stands for other rows")
    if (row.name, row.kind) in _ROWS:
        raise UsageError(f"backend {row.name!r} is registered twice for {row.kind.value}")
    _ROWS[row.name, row.kind] = row
    return row


@lru_cache(maxsize=1)
def _load_builtin() -> None:
    package = importlib.import_module("attnmatrix.harness.backends")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        _collect(f"entry point {entry.name!r} ({entry.value})", entry.load)


def load_plugin(path: str | Path) -> None:
    """Import a row file from anywhere. Raises UsageError when it cannot be read, registers nothing or a bad row; then it adds no row."""
    path = Path(path)
    _load_builtin()
    name = f"attnmatrix_plugin_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UsageError(f"cannot read plugin {str(path)!r}: expected a Python file")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[name] = module
    before = len(_ROWS)

    def execute() -> None:
        loader.exec_module(module)
        if len(_ROWS) == before:
            raise UsageError("registers no backend")

    try:
        _collect(f"plugin {str(path)!r}", execute)
    except UsageError:
        del sys.modules[name]
        raise


def _collect(what: str, load: Callable[[], object]) -> None:
    """Import foreign rows. What that prints goes to stderr, so that ``--json`` stays JSON; of a failed import, its last line is told.

    Raises UsageError, and takes back what was registered, when it fails.
    """
    before = dict(_ROWS)
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            load()
    except (Exception, SystemExit) as error:
        _ROWS.clear()
        _ROWS.update(before)
        problem = str(error) if isinstance(error, UsageError) else f"failed to import: {type(error).__name__}: {error}"
        last = printed.getvalue().strip().rpartition("\n")[2]
        raise UsageError(f"{what}: {problem}" + (f"; it printed {last!r}" if last else "")) from error
    sys.stderr.write(printed.getvalue())


def rows() -> tuple[Row, ...]:
    """All registered rows, by kind and name."""
    _load_builtin()
    order = list(AttentionKind)
    return tuple(sorted(_ROWS.values(), key=lambda row: (order.index(row.kind), row.name)))


def find_rows(name: str) -> tuple[Row, ...]:
    """The rows called ``name``, one per kind; ``prefill,decode`` names a hybrid. Raises UsageError naming the known rows.

    Aliases are resolved before (see ``choose``): they depend on the device.
    """
    from attnmatrix.harness.hybrid import hybrid_rows

    if "," in name:
        return hybrid_rows(name)
    if name in (*ALIASES, AUTO):
        raise UsageError(
            f"backend {name!r} stands for a row that depends on the device; name one of {', '.join(ALIASES.get(name, (row.name for row in rows())))}"
        )
    found = tuple(row for row in rows() if row.name == name)
    if not found:
        raise UsageError(f"unknown backend {name!r}; known: {', '.join(known_names())}")
    return found


def find_row(name: str, kind: AttentionKind) -> Row:
    """The row called ``name`` of one kind. Raises UsageError when there is none."""
    for row in find_rows(name):
        if row.kind is kind:
            return row
    raise UsageError(f"backend {name!r} has no {kind.value} row")


def known_names() -> tuple[str, ...]:
    """Names of rows, of aliases and ``auto``."""
    return (*dict.fromkeys(row.name for row in rows()), *ALIASES, AUTO)
