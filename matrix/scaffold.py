"""``attnmatrix new-backend``: a row to fill in."""

from __future__ import annotations

import keyword
from pathlib import Path

import jinja2

from attnmatrix.harness.registry import UsageError, known_names
from attnmatrix.harness.row_check import name_problem
from attnmatrix.matrix.whole_file import write_whole


def write_row(name: str, out: Path | None) -> str:
    """Write the template for ``name``; returns what to do next. Raises UsageError for a taken or unusable name or file."""
    problem = name_problem(name)
    if problem:
        raise UsageError(f"backend name {name!r}: {problem}")
    if name in known_names():
        raise UsageError(f"backend {name!r} exists already; known: {', '.join(known_names())}")
    package = name.replace("-", "_")
    if not package.isidentifier() or keyword.iskeyword(package):
        package = f"kernel_{package}"
    target = out or Path(f"{package}_row.py")  # not the name of the package, which it would hide where it lies
    if target.exists():
        raise UsageError(f"{str(target)!r} exists already")
    template = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), keep_trailing_newline=True).get_template(
        "row.py.j2"
    )
    write_whole(target, template.render(name=name, package=package).encode())
    return f"wrote {target}; fill it in, then: attnmatrix run --plugin {target} --backend {name} --mode eager"
