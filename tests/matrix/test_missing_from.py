"""A run goes on where another was cut short: cells that have a record of this code and machine are left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from attnmatrix.matrix.evidence_file import read, write
from attnmatrix.matrix.record import Record
from attnmatrix.matrix.recorded import without_recorded
from attnmatrix.matrix.selection import Selection

FIRST, SECOND = "decode-p16-prefix7-new1-h2x1x32-fp32-shuffled", "decode-p16-prefix9-new1-h2x1x32-fp32-shuffled"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attnmatrix.matrix", "run", "--backend", "torch", "--mode", "eager", "--device", "cpu", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The record of a run of the first case."""
    folder = tmp_path_factory.mktemp("recorded")
    assert run(folder, "--case", FIRST, "--evidence", "old.jsonl").returncode == 0
    (record,) = read(folder / "old.jsonl")
    return record


def test_what_is_recorded_is_not_run_again(tmp_path: Path, recorded: Record) -> None:
    write(tmp_path / "old.jsonl", [recorded])
    both = ("--case", FIRST, "--case", SECOND)
    more = run(tmp_path, *both, "--missing-from", "old.jsonl", "--evidence", "new.jsonl")
    assert more.returncode == 0, more.stderr
    assert [record.case for record in read(tmp_path / "new.jsonl")] == [SECOND]
    write(tmp_path / "all.jsonl", [recorded, *read(tmp_path / "new.jsonl")])
    done = run(tmp_path, *both, "--missing-from", "all.jsonl", "--evidence", "none.jsonl")
    assert (done.returncode, done.stdout) == (0, "nothing to run: all.jsonl has a record of each of the 2 cells\n")
    assert not (tmp_path / "none.jsonl").exists()


def test_a_record_of_other_code_or_another_device_does_not_count(tmp_path: Path, recorded: Record) -> None:
    cells = Selection(("torch",), ("eager",), (FIRST,), "cpu").cells()
    others = ({"fingerprint": "0" * len(recorded.fingerprint)}, {"device": "another"}, {"versions": {"torch": "0.1"}})
    for number, changes in enumerate(({}, *others)):
        evidence = tmp_path / f"{number}.jsonl"
        write(evidence, [msgspec.structs.replace(recorded, **changes)])
        assert without_recorded(cells, evidence, "cpu") == (cells if changes else ()), changes
