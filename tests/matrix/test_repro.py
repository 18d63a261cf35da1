"""Stand-alone scripts: short, free of this project, right about rows that are right and about rows that are wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attnmatrix.cases.ids import parse_case
from attnmatrix.harness.registry import UsageError, find_row
from attnmatrix.matrix.repro import MAX_LINES, repro_script

CASES = [
    ("torch", "extend-p16-prefix0.8.16-new15.8.1-h4x2x128-fp32-shuffled", 0),
    ("torch", "decode-p16-prefix14.15.16-new1.1.1-h4x2x128-bf16-shuffled", 0),
    ("conch", "extend-p16-prefix0.0.0-new15.16.17-h4x2x128-fp32-shuffled", 0),
    ("conch", "extend-p16-prefix16-new2-h4x2x128-fp32-shuffled", 1),
    ("conch", "decode-p16-prefix14.15.16-new1.1.1-h4x2x128-fp32-shuffled", 0),
    ("torch", "lightning-extend-p16-prefix0.8.16-new15.8.1-h2x2x128-fp32-shuffled", 0),
    ("seg_la", "lightning-extend-p16-prefix0.8-new5.3-h2x2x128-fp32-shuffled", 0),
    ("seg_la", "lightning-extend-p16-prefix0-new1-h2x2x128-fp32-shuffled", 1),
]


@pytest.mark.parametrize(("backend", "text", "code"), CASES, ids=str)
def test_a_script_stands_alone_and_tells(tmp_path: Path, backend: str, text: str, code: int) -> None:
    case = parse_case(text)
    script = repro_script(find_row(backend, case.kind), case)
    assert len(script.splitlines()) <= MAX_LINES
    assert "attnmatrix" not in script
    (tmp_path / "repro.py").write_text(script)
    done = subprocess.run([sys.executable, "-I", "repro.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "request 0:" in done.stdout


def test_a_case_that_no_script_covers_is_refused() -> None:
    case = parse_case("extend-p16-prefix8-new8-h4x2x128-fp32-shuffled-alibi")
    with pytest.raises(UsageError, match="ALiBi"):
        repro_script(find_row("torch", case.kind), case)
