"""Cells are pytest items: rows from plugin files, failures with a message, workers, crashed workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROW = """
import os
from attnmatrix.cases.case import AttentionKind
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.registry import Row, register

class Odd(TorchSoftmax):
    def forward(self, q, k, v, layer_id, batch):
        out = super().forward(q, k, v, layer_id, batch)
        {fault}
        return out

register(Row(name="odd", kind=AttentionKind.SOFTMAX, create=Odd, source=__file__))
"""


def _run(tmp_path: Path, fault: str, *arguments: str) -> tuple[int, str, list[dict[str, object]]]:
    plugin, evidence = tmp_path / "odd.py", tmp_path / "e.jsonl"
    plugin.write_text(ROW.format(fault=fault))
    command = [sys.executable, "-m", "attnmatrix.matrix", "run", "--plugin", str(plugin), "--backend", "odd", "--device", "cpu"]
    done = subprocess.run([*command, "--evidence", str(evidence), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    records = [json.loads(line) for line in evidence.read_text().splitlines()] if evidence.exists() else []
    return done.returncode, done.stdout + done.stderr, records


def test_a_failure_says_what_where_and_how_to_see_it_again(tmp_path: Path) -> None:
    code, text, records = _run(tmp_path, "out[-1] = 0", "--mode", "eager", "--case", "page_size_1")
    assert code == 1
    assert [r["status"] for r in records] == ["fail"]
    for expected in (
        "fail: row 'odd' (softmax), mode eager, cpu",
        "out of layer",
        "token 3",
        f"again:  attnmatrix run --plugin {tmp_path / 'odd.py'} --backend odd",
        "layout: attnmatrix explain",
    ):
        assert expected in text
    assert "Traceback" not in text


def test_workers_send_their_records(tmp_path: Path) -> None:
    code, text, records = _run(tmp_path, "pass", "--mode", "eager", "-n", "2", "--case", "page_size_1", "--case", "prefix_exact_page")
    assert code == 0, text
    assert len(records) == 2


def test_a_process_that_dies_is_a_crash_and_the_next_cell_runs(tmp_path: Path) -> None:
    fault = "os._exit(9) if batch.num_tokens == 4 else None"
    code, text, records = _run(tmp_path, fault, "--mode", "eager", "-n", "1", "--case", "page_size_1", "--case", "prefix_exact_page")
    assert code == 1, text
    assert {str(r["case_name"]): r["status"] for r in records} == {"page_size_1": "crash", "prefix_exact_page": "pass"}


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_a_backend_that_asks_the_process_to_end_is_a_crash_and_the_next_cell_runs(tmp_path: Path, workers: tuple[str, ...]) -> None:
    fault = "import sys; sys.exit(0) if batch.num_tokens == 4 else None"
    code, text, records = _run(tmp_path, fault, "--mode", "eager", *workers, "--case", "page_size_1", "--case", "prefix_exact_page")
    assert code == 1, text
    assert {str(r["case_name"]): (r["status"], r["reason"]) for r in records} == {
        "page_size_1": ("crash", "the backend asked the process to end: sys.exit(0)"),
        "prefix_exact_page": ("pass", ""),
    }
    assert "Traceback" not in text


def _plugins(tmp_path: Path, texts: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Exit code and text of a run with one plugin file for each text."""
    command = [sys.executable, "-m", "attnmatrix.matrix", "run", "--device", "cpu", "--mode", "eager", "--case", "page_size_1"]
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        command += ["--plugin", name]
    done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_plugin_cannot_replace_a_row(tmp_path: Path) -> None:
    text = """
from dataclasses import replace
from attnmatrix.cases.case import AttentionKind
from attnmatrix.harness.registry import find_row, register

register(replace(find_row("torch", AttentionKind.SOFTMAX), summary="another"))
"""
    code, told = _plugins(tmp_path, {"taken.py": text}, "--backend", "torch")
    assert code == 2
    assert "registered twice" in told


def test_two_plugin_files_of_one_name_both_count(tmp_path: Path) -> None:
    two = {f"{folder}/odd.py": ROW.format(fault="pass").replace('"odd"', f'"{folder}"') for folder in ("one", "two")}
    code, told = _plugins(tmp_path, two, "--backend", "two", "--evidence", "e.jsonl")
    assert code == 0, told
    assert [json.loads(line)["status"] for line in (tmp_path / "e.jsonl").read_text().splitlines()] == ["pass"]


def test_a_plugin_that_exits_is_a_usage_error(tmp_path: Path) -> None:
    code, told = _plugins(tmp_path, {"leaves.py": "import sys\nsys.exit(3)\n"}, "--backend", "torch")
    assert code == 2
    assert "failed to import: SystemExit: 3" in told


def test_records_of_a_plugins_row_are_stale_once_it_was_edited(tmp_path: Path) -> None:
    code, text, _ = _run(tmp_path, "pass", "--mode", "eager", "--case", "page_size_1")
    assert code == 0, text
    plugin, page = tmp_path / "odd.py", tmp_path / "page.md"

    def cell(*arguments: str) -> str:
        command = [sys.executable, "-m", "attnmatrix.matrix", "render", "--evidence", str(tmp_path / "e.jsonl"), "--out", str(page)]
        subprocess.run([*command, *arguments], cwd=tmp_path, check=True, capture_output=True)
        return next(line for line in page.read_text().splitlines() if line.startswith("| `odd`"))

    assert "∅ 1 vacuous" in cell("--plugin", str(plugin))
    plugin.write_text(plugin.read_text().replace("return out", "return out * 1"))
    assert "stale 1" in cell("--plugin", str(plugin))
    assert "∅ 1 vacuous" in cell()


def test_the_committed_pages_hold_no_plugins_row(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ROW.format(fault="pass"))
    command = [sys.executable, "-m", "attnmatrix.matrix", "render", "--plugin", str(tmp_path / "odd.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "attnmatrix: --plugin needs --out: the committed pages hold the rows of this repository only",
    )
