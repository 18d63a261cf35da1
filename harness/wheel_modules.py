"""Modules of an installed distribution that import each other, loaded under their own names without the packages around them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from attnmatrix.harness.installed import installed_file

_LOADED: dict[tuple[str, tuple[str, ...]], dict[str, ModuleType]] = {}  # by distribution and stand-ins


def load_modules(distribution: str, names: Sequence[str], stand_ins: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """Import modules by their dotted names, once for each set of stand-ins; the packages above them are empty and their ``__init__`` does not
    run.

    ``stand_ins``, by dotted name, take the place of modules that need far more than the kernels do. What the imports leave in
    ``sys.modules`` is taken out again, and what was there before is put back. Raises LookupError when the distribution is absent or has
    no such file.
    """
    loaded = _LOADED.setdefault((distribution, tuple(sorted(stand_ins))), {})
    if any(name not in loaded for name in names):
        files = {name: installed_file(distribution, f"{name.replace('.', '/')}.py") for name in names}
        with _hollow_packages(files, {**stand_ins, **loaded}):
            loaded.update({name: importlib.import_module(name) for name in names})
    return {name: loaded[name] for name in names}


@contextmanager
def _hollow_packages(files: Mapping[str, Path], stand_ins: Mapping[str, ModuleType]) -> Iterator[None]:
    """Within the block the packages above ``files`` know only where these lie; afterwards ``sys.modules`` is as before."""
    roots = {name.partition(".")[0] for name in (*files, *stand_ins)}
    before = _taken_out(roots)
    try:
        for name in stand_ins:
            sys.modules.update({package: ModuleType(package) for package in _above(name)})
        for name, path in files.items():
            for package, folder in zip(_above(name), reversed(path.parents[: name.count(".")]), strict=True):
                hollow = sys.modules.setdefault(package, ModuleType(package))
                hollow.__path__ = [str(folder)]
        sys.modules.update(stand_ins)
        yield
    finally:
        _taken_out(roots)
        sys.modules.update(before)


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _taken_out(roots: set[str]) -> dict[str, ModuleType]:
    """The modules of these top-level packages, removed from ``sys.modules``."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in roots}
