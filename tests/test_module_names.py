"""Every module of ours is loaded once, under ``attnmatrix.``: a second copy would have registries and enums of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
PACKAGES = ("cases", "references", "harness", "matrix")

LOAD_EVERYTHING = """
import importlib, json, pkgutil, sys
import pytest

code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests", "matrix"])
for package in ("cases", "references", "harness", "matrix"):
    module = importlib.import_module(f"attnmatrix.{package}")
    for found in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
        if ".findings." not in found.name and not found.name.endswith(".__main__"):
            importlib.import_module(found.name)
print()
print(json.dumps({"code": int(code), "modules": {n: getattr(m, "__file__", None) for n, m in sys.modules.items()}}))
"""


def test_nothing_is_loaded_under_a_bare_name() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOAD_EVERYTHING],
        cwd=TOP,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["code"] == 0, run.stdout[-2000:]
    modules: dict[str, str | None] = report["modules"]
    assert "attnmatrix.harness.cell" in modules
    bare = [name for name in modules if name.split(".")[0] in PACKAGES]
    assert not bare
    homes = [str(TOP / package) + os.sep for package in PACKAGES]
    strangers = {
        name: file for name, file in modules.items() if file and file.startswith(tuple(homes)) and not name.startswith("attnmatrix.")
    }
    assert not strangers
    files = [file for file in modules.values() if file and file.startswith(tuple(homes))]
    assert len(set(files)) == len(files), "one file, two modules"
