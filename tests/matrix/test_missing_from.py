"""A run goes on where another was cut short: cells that have a record of this code and machine are left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from attnmatrix.matrix.evidence_file import read, write

FIRST, SECOND = "decode-p16-prefix7-new1-h2x1x32-fp32-shuffled", "decode-p16-prefix9-new1-h2x1x32-fp32-shuffled"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attnmatrix.matrix", "run", "--backend", "torch", "--mode", "eager", "--device", "cpu", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_what_is_recorded_is_not_run_again(tmp_path: Path) -> None:
    assert run(tmp_path, "--case", FIRST, "--evidence", "old.jsonl").returncode == 0
    both = ("--case", FIRST, "--case", SECOND)
    more = run(tmp_path, *both, "--missing-from", "old.jsonl", "--evidence", "new.jsonl")
    assert more.returncode == 0, more.stderr
    assert [record.case for record in read(tmp_path / "new.jsonl")] == [SECOND]
    write(tmp_path / "all.jsonl", [*read(tmp_path / "old.jsonl"), *read(tmp_path / "new.jsonl")])
    done = run(tmp_path, *both, "--missing-from", "all.jsonl", "--evidence", "none.jsonl")
    assert (done.returncode, done.stdout) == (0, "nothing to run: all.jsonl has a record of each of the 2 cells\n")
    assert not (tmp_path / "none.jsonl").exists()


def test_a_record_of_other_code_or_another_device_does_not_count(tmp_path: Path) -> None:
    run(tmp_path, "--case", FIRST, "--evidence", "old.jsonl")
    (record,) = read(tmp_path / "old.jsonl")
    others = ({"fingerprint": "0" * len(record.fingerprint)}, {"device": "another"}, {"versions": {"torch": "0.1"}})
    for number, changes in enumerate(others):
        write(tmp_path / f"{number}.jsonl", [msgspec.structs.replace(record, **changes)])
        again = run(tmp_path, "--case", FIRST, "--missing-from", f"{number}.jsonl", "--evidence", "new.jsonl")
        assert "1 records written to new.jsonl" in again.stdout, (changes, again.stdout, again.stderr)


def test_evidence_that_cannot_be_read(tmp_path: Path) -> None:
    result = run(tmp_path, "--case", FIRST, "--missing-from", "absent.jsonl")
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1 and "absent.jsonl" in result.stderr
