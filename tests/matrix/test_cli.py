"""The command line: usage errors are one line, exit code 2 and write nothing; listing starts without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnmatrix.matrix.cli import main

CLI = [sys.executable, "-m", "attnmatrix.matrix"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command that needs no process of its own."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0), capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--backend", "nosuch", "--evidence", "out/e.jsonl"], "unknown backend 'nosuch'; known: "),
        (["render", "--evidence", "absent", "--out", "x.md"], "cannot read evidence 'absent'"),
    ],
    ids=["run", "render"],
)
def test_bad_usage_is_one_line_and_writes_nothing(tmp_path: Path, arguments: list[str], expected: str) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_run_writes_records_and_the_matrix_renders_from_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(
        "run", "--backend", "torch", "--mode", "eager", "--case", "page_size_1", "--device", "cpu", "--evidence", "e.jsonl", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    records = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert {r["kind"] for r in records} == {"softmax", "lightning"}
    for r in records:
        assert {"backend", "mode", "status", "case", "kind", "device", "graph"} <= r.keys()
        assert (r["backend"], r["mode"], r["status"], r["device"]) == ("torch", "eager", "pass", "cpu")
    monkeypatch.chdir(tmp_path)
    assert told(capsys, "render", "--evidence", "e.jsonl", "--out", "m.md")[0] == 0
    assert told(capsys, "render", "--evidence", "e.jsonl", "--out", "m.md", "--check")[0] == 0
    (tmp_path / "m.md").write_text((tmp_path / "m.md").read_text() + "edited\n")
    assert told(capsys, "render", "--evidence", "e.jsonl", "--out", "m.md", "--check")[0] == 1


@pytest.mark.parametrize("what", ["backends", "modes", "cases"])
def test_lists_are_json_on_demand(capsys: pytest.CaptureFixture[str], what: str) -> None:
    assert json.loads(told(capsys, "list", what, "--json")[1])[what]


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


def test_a_new_row_starts_from_a_template_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "new-backend", "my-kernel", "--out", str(tmp_path / "my_kernel_row.py"))[0] == 0
    done = run("list", "backends", "--plugin", "my_kernel_row.py", "--json", cwd=tmp_path)
    listed = {row["backend"]: row for row in json.loads(done.stdout)["backends"]}
    assert "not installed" in listed["my-kernel"]["packages"]


def test_explain_shows_pages_and_masks(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "explain", "cross_page_boundary")[1]
    assert "request 0: 15 cached, 2 new; pages" in text
    assert "token   0  ###############|#." in text


def test_explain_shows_the_scales_of_a_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cached in fp8e4m3, their scales 0.37 and 1.9 in even layers" in told(capsys, "explain", "fp8_decode")[1]
