"""``new-backend`` writes a row that runs as soon as its package is there: tried with a small Triton kernel in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_triton_kernel import KERNEL, install

from attnmatrix.harness.registry import UsageError
from attnmatrix.matrix.scaffold import write_row

CASES = {
    "eager": "extend-p16-prefix0.17-new3.2-h4x2x64-fp32-shuffled",
    "cg_decode": "decode-p16-prefix14.15.16-new1.1.1-h2x1x64-fp32-shuffled",
    "verify": "target_verify-p16-prefix7.16-new3.3-h2x1x64-fp32-shuffled",
}


def _attnmatrix(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "attnmatrix.matrix", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout + done.stderr


def _run(tmp_path: Path, *more: str, modes: tuple[str, ...] = tuple(CASES)) -> tuple[int, str, set[tuple[str, str]]]:
    write_row("my-kernel", tmp_path / "my_kernel_row.py")
    chosen = [word for mode in modes for word in ("--mode", mode, "--case", CASES[mode])]
    place = ["--plugin", "my_kernel_row.py", "--backend", "my-kernel", "--device", "cpu", "--evidence", "e.jsonl"]
    code, told = _attnmatrix(tmp_path, "run", *place, *chosen, *more)
    lines = (tmp_path / "e.jsonl").read_text().splitlines() if (tmp_path / "e.jsonl").exists() else []
    return code, told, {(r["mode"], r["status"]) for r in map(json.loads, lines)}


def test_the_template_is_a_row_that_runs_in_eager_graph_and_verify_modes(tmp_path: Path) -> None:
    install(tmp_path / "site", "my_kernel")
    window = "extend-p16-prefix0.17-new3.2-h4x2x64-fp32-shuffled-w4"
    code, told, statuses = _run(tmp_path, "--case", window)
    assert code == 0, told
    assert statuses == {("cg_decode", "pass"), ("eager", "n/a"), ("eager", "pass"), ("verify", "pass")}


def test_a_wrong_kernel_behind_the_template_fails(tmp_path: Path) -> None:
    install(tmp_path / "site", "my_kernel", KERNEL.replace("position <= last", "position < last + (last == 0)"))
    code, told, statuses = _run(tmp_path, modes=("verify",))
    assert code == 1, told
    assert statuses == {("verify", "fail")}


def test_without_its_package_the_row_is_listed_and_not_run(tmp_path: Path) -> None:
    code, told, _ = _run(tmp_path)
    assert (code, told.count("\n")) == (2, 1)
    assert "my-kernel (softmax): untested, my_kernel not installed" in told


@pytest.mark.parametrize("name", ["class", "3d", "a-b_c", "my-kernel"])
def test_every_name_that_can_be_typed_gives_python(tmp_path: Path, name: str) -> None:
    write_row(name, tmp_path / "new" / "row.py")
    compile((tmp_path / "new" / "row.py").read_text(), "row.py", "exec")


@pytest.mark.parametrize("name", ["Bad Name", "a,b", "", "-n", "torch", "fa", "auto"])
def test_other_names_are_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="backend name" if name not in ("torch", "fa", "auto") else "exists already"):
        write_row(name, tmp_path / "new" / "row.py")
    assert not list(tmp_path.iterdir())
