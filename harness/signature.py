"""What a package's function can be asked for, read from its installed source without importing it."""

from __future__ import annotations

import ast
import re
from functools import cache

from attnmatrix.harness.installed import installed_file


@cache
def parameters(distribution: str, ending: str, function: str) -> tuple[str, ...]:
    """Parameter names of a module-level function in an installed distribution's file.

    Raises LookupError when there is no such distribution, file or function.
    """
    for node in ast.parse(installed_file(distribution, ending).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            given = node.args
            return tuple(arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    raise LookupError(f"{ending} of {distribution} defines no function {function!r}")


def has_parameter(distribution: str, ending: str, function: str, pattern: str) -> bool:
    """Whether a parameter's name contains a match of the regular expression ``pattern``."""
    return any(re.search(pattern, name) for name in parameters(distribution, ending, function))
