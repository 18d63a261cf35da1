"""Kernels of a wheel are loaded without the packages around them, and leave nothing behind in ``sys.modules``."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from attnmatrix.harness import wheel_modules

FILES = {
    "wheel/__init__.py": "raise ImportError('the package needs an engine')",
    "wheel/ops/__init__.py": "raise ImportError('so does this')",
    "wheel/ops/first.py": "from wheel.ops.second import two\nfrom wheel.engine.facts import fact\n",
    "wheel/ops/second.py": "two = 2\n",
}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def installed_file(distribution: str, ending: str) -> Path:
        if not (tmp_path / ending).is_file():
            raise LookupError(f"the distribution {distribution} has 0 files {ending}, expected one")
        return tmp_path / ending

    monkeypatch.setattr(wheel_modules, "installed_file", installed_file)
    monkeypatch.setattr(wheel_modules, "_LOADED", {})


def facts() -> dict[str, ModuleType]:
    made = ModuleType("wheel.engine.facts")
    vars(made)["fact"] = "stands in"
    return {made.__name__: made}


@pytest.mark.usefixtures("wheel")
def test_modules_import_each_other_and_the_stand_in() -> None:
    loaded = wheel_modules.load_modules("wheel", ["wheel.ops.first"], facts())["wheel.ops.first"]
    assert (loaded.two, loaded.fact) == (2, "stands in")
    assert wheel_modules.load_modules("wheel", ["wheel.ops.first"], facts())["wheel.ops.first"] is loaded
    with pytest.raises(ImportError):
        wheel_modules.load_modules("wheel", ["wheel.ops.first"], {})  # what it was loaded with is not there for others


@pytest.mark.usefixtures("wheel")
def test_what_was_imported_before_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ModuleType("wheel")
    monkeypatch.setitem(sys.modules, "wheel", whole)
    wheel_modules.load_modules("wheel", ["wheel.ops.second"], facts())
    assert {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "wheel"} == {"wheel": whole}


@pytest.mark.usefixtures("wheel")
def test_a_failing_import_leaves_nothing_behind() -> None:
    with pytest.raises(ImportError, match="facts"):
        wheel_modules.load_modules("wheel", ["wheel.ops.first"], {"wheel.engine.other": ModuleType("wheel.engine.other")})
    with pytest.raises(LookupError, match=r"wheel/ops/third\.py"):
        wheel_modules.load_modules("wheel", ["wheel.ops.third"], {})
    assert not [name for name in sys.modules if name.partition(".")[0] == "wheel"]
