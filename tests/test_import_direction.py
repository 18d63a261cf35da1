"""Four packages, one direction: cases <- references <- harness <- matrix; a reference shares no helper with a backend."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "cases": {"cases"},
    "references": {"cases", "references"},
    "harness": {"cases", "references", "harness"},
    "matrix": {"cases", "references", "harness", "matrix"},
}


def sources(package: str) -> list[Path]:
    return sorted(TOP.joinpath(package).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of imported modules and members, and the names given to ``import_module``, wherever they stand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "LazyModule"):
                yield str(node.args[0].value)


def imported_by(path: Path) -> set[str]:
    return set(imports(ast.parse(path.read_text())))


def ours(names: set[str]) -> set[str]:
    return {name.removeprefix("attnmatrix.") for name in names if name.split(".")[0] == "attnmatrix"}


def in_package(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    assert sources(package)
    for path in sources(package):
        wrong = {name for name in ours(imported_by(path)) if name.split(".")[0] not in MAY_IMPORT[package]}
        assert not wrong, f"{path.relative_to(TOP)} imports {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_nothing_of_ours_is_imported_by_its_bare_name(package: str) -> None:
    for path in [*sources(package), *sources("tests"), *TOP.glob("*.py")]:
        bare = {name for name in imported_by(path) if in_package(name, package)}
        assert not bare, f"{path.relative_to(TOP)} imports {', '.join(sorted(bare))}"


@pytest.mark.parametrize(("package", "allowed"), [("cases", set()), ("references", {"torch"})])
def test_what_is_tried_and_what_is_right_need_nothing_else(package: str, allowed: set[str]) -> None:
    known = allowed | {"attnmatrix", *sys.stdlib_module_names}
    for path in sources(package):
        wrong = {name for name in imported_by(path) if name.split(".")[0] not in known}
        assert not wrong, f"{path.relative_to(TOP)} imports {', '.join(sorted(wrong))}"


def test_a_reference_takes_data_and_no_helper_from_us() -> None:
    taken = {name for path in sources("references") for name in ours(imported_by(path)) if not name.startswith("references.")}
    assert taken <= {"cases.case.Case", "cases.options.Tree"}


def test_references_and_backends_share_no_code() -> None:
    reference = {name for path in sources("references") for name in ours(imported_by(path))}
    for path in sources("harness/backends"):
        backend = ours(imported_by(path))
        wrong = {name for name in backend if name.split(".")[0] == "references"} | (backend & reference - {"cases.case.Case"})
        assert not wrong, f"{path.relative_to(TOP)} shares {', '.join(sorted(wrong))} with the references"


def test_a_reference_calls_no_fused_attention() -> None:
    for path in sources("references"):
        assert "scaled_dot_product_attention" not in path.read_text(), path.name
