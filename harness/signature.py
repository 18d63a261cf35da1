"""What a package's function can be asked for, read from its installed source without importing it."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from functools import cache
from pathlib import Path


@cache
def parameters(distribution: str, file: str, function: str) -> tuple[str, ...]:
    """Parameter names of a module-level function of an installed distribution; ``file`` as its record lists it.

    Raises LookupError when there is no such distribution, file or function.
    """
    for node in ast.parse(installed_file(distribution, file).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            given = node.args
            return tuple(arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    raise LookupError(f"{file} of {distribution} defines no function {function!r}")


def installed_file(distribution: str, file: str) -> Path:
    """Where a file of an installed distribution lies. Raises LookupError when it or the distribution is absent."""
    try:
        entries = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise LookupError(f"the distribution {distribution} is not installed") from None
    for entry in entries:
        if entry.as_posix() == file:
            return Path(str(entry.locate()))
    raise LookupError(f"the distribution {distribution} has no file {file}")


def has_parameter(distribution: str, file: str, function: str, pattern: str) -> bool:
    """Whether a parameter's name contains a match of the regular expression ``pattern``."""
    return any(re.search(pattern, name) for name in parameters(distribution, file, function))
