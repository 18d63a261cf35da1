"""The command line: usage errors are one line, exit code 2 and write nothing; listing starts without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CLI = [sys.executable, "-m", "attnmatrix.matrix"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--backend", "nosuch"], "unknown backend 'nosuch'; known: "),
        (["run", "--backend", "torch,nosuch"], "unknown backend 'nosuch'"),
        (["run", "--backend", "torch,torch,torch"], "pair 'prefill,decode'"),
        (["run", "--mode", "nosuch"], "unknown mode 'nosuch'; known: eager, "),
        (["run", "--case", "extend-p16-nonsense"], "unknown case id 'extend-p16-nonsense': part 'nonsense'"),
        (["run", "--case", "decode-p16-prefix4-new2-h4x2x128-bf16-shuffled"], "exactly one new token"),
        (["run", "--device", "tpu"], "unknown device 'tpu'"),
        (["run", "--plugin", "absent.py"], "cannot read plugin 'absent.py'"),
        (["render", "--evidence", "absent", "--out", "x.md"], "cannot read evidence 'absent'"),
        (["compare", "absent", "absent"], "cannot read evidence 'absent'"),
        (["explain", "nosuch"], "unknown case id 'nosuch'"),
        (["new-backend", "torch"], "backend 'torch' exists already"),
        (["new-backend", "Bad Name"], "backend name 'Bad Name'"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_usage_is_one_line_and_writes_nothing(tmp_path: Path, arguments: list[str], expected: str) -> None:
    extra = ["--evidence", "out/e.jsonl"] if arguments[0] == "run" else []
    done = run(*arguments, *extra, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_truncated_evidence_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text('{"backend": "torch"')
    done = run("render", "--evidence", "e.jsonl", "--out", "x.md", cwd=tmp_path)
    assert done.returncode == 2
    assert "truncated: line 1" in done.stderr
    assert not (tmp_path / "x.md").exists()


def test_a_run_writes_records_and_the_matrix_renders_from_them(tmp_path: Path) -> None:
    done = run(
        "run", "--backend", "torch", "--mode", "eager", "--case", "page_size_1", "--device", "cpu", "--evidence", "e.jsonl", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    records = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert {r["kind"] for r in records} == {"softmax", "lightning"}
    for r in records:
        assert {"backend", "mode", "status", "case", "kind", "device", "graph"} <= r.keys()
        assert (r["backend"], r["mode"], r["status"], r["device"]) == ("torch", "eager", "pass", "cpu")
    assert run("render", "--evidence", "e.jsonl", "--out", "m.md", cwd=tmp_path).returncode == 0
    assert run("render", "--evidence", "e.jsonl", "--out", "m.md", "--check", cwd=tmp_path).returncode == 0
    (tmp_path / "m.md").write_text((tmp_path / "m.md").read_text() + "edited\n")
    assert run("render", "--evidence", "e.jsonl", "--out", "m.md", "--check", cwd=tmp_path).returncode == 1


@pytest.mark.parametrize("what", ["backends", "modes", "cases"])
def test_lists_are_json_on_demand(tmp_path: Path, what: str) -> None:
    assert json.loads(run("list", what, "--json", cwd=tmp_path).stdout)[what]


def test_listing_and_collecting_import_neither_torch_nor_a_package() -> None:
    code = """
import sys
from attnmatrix.harness.registry import rows
from attnmatrix.matrix.selection import Selection
assert rows() and Selection().cells()
loaded = {name.partition(".")[0] for name in sys.modules} & {"torch", "triton", "conch", "sglang", "flashinfer", "flash_attn", "fla"}
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_new_row_starts_from_a_template_that_loads(tmp_path: Path) -> None:
    assert run("new-backend", "my-kernel", cwd=tmp_path).returncode == 0
    done = run("list", "backends", "--plugin", "my_kernel_row.py", "--json", cwd=tmp_path)
    listed = {row["backend"]: row for row in json.loads(done.stdout)["backends"]}
    assert "not installed" in listed["my-kernel"]["packages"]


def test_explain_shows_pages_and_masks(tmp_path: Path) -> None:
    text = run("explain", "cross_page_boundary", cwd=tmp_path).stdout
    assert "request 0: 15 cached, 2 new; pages" in text
    assert "token   0  ###############|#." in text


def test_explain_shows_the_scales_of_a_cache(tmp_path: Path) -> None:
    assert "cached in fp8e4m3, their scales 0.37 and 1.9 in even layers" in run("explain", "fp8_decode", cwd=tmp_path).stdout
