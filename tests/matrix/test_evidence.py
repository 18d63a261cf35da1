"""Evidence files are whole, merged by key, and never half written."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest
from made_records import record
from torch import Tensor

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.layouts import seed_layouts
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.registry import Row, UsageError
from attnmatrix.matrix.evidence_file import check_evidence_place, merge, read, read_file, write
from attnmatrix.matrix.pytest_plugin import RECORD_KEY
from attnmatrix.matrix.record import portable
from attnmatrix.matrix.run import run_and_record
from attnmatrix.matrix.selection import CellId


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    records = [record(), record(mode="verify", status="fail", margin=None)]
    write(tmp_path / "e.jsonl", records)
    assert read_file(tmp_path / "e.jsonl") == merge(records)


def test_the_requirements_of_a_gpu_runner_name_each_package_of_the_evidence() -> None:
    top = Path(__file__).resolve().parents[2]
    listed = set(re.findall(r"^(?:# )?([\w-]+==[\w.]+)$", (top / "ci/requirements-gpu.txt").read_text(), re.MULTILINE))
    records = read_file(top / "matrix/evidence/h200.jsonl")
    used = {f"{name}=={version.split('+')[0]}" for record in records for name, version in record.versions.items()}
    assert {package for package in used if not package.startswith(("torch==", "triton=="))} <= listed


def test_evidence_goes_to_where_a_link_leads(tmp_path: Path) -> None:
    target, link = tmp_path / "disk" / "e.jsonl", tmp_path / "link.jsonl"
    target.parent.mkdir()
    write(target, [record()])
    link.symlink_to(target)
    check_evidence_place(link)
    write(link, [record(mode="verify")])
    assert link.is_symlink()
    assert [one.mode for one in read_file(target)] == ["verify"]


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for attempt in (lambda: check_evidence_place(pipe), lambda: write(pipe, [record()])):
        with pytest.raises(UsageError, match="a device, a pipe or a socket"):
            attempt()
    assert pipe.is_fifo()


def test_a_file_that_is_no_evidence_is_not_overwritten(tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("# notes\n")
    with pytest.raises(UsageError, match=r"will not overwrite .*notes.md', which is no evidence: .*line 1"):
        check_evidence_place(notes)
    empty, old = tmp_path / "empty.jsonl", tmp_path / "old.jsonl"
    empty.touch()
    write(old, [record()])
    check_evidence_place(empty)
    check_evidence_place(old)


def test_a_binary_file_is_no_evidence(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b"\x7fELF\0\0\n\0")
    with pytest.raises(UsageError, match="is no text: expected JSON lines"):
        read_file(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(UsageError, match="line 1"):
        read_file(path)


def test_a_truncated_file_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    write(path, [record(), record(mode="verify")])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UsageError, match="truncated: line 2"):
        read_file(path)


@pytest.mark.parametrize("line", ["{}", "nonsense", '{"backend": 3}'])
def test_a_foreign_line_is_refused_by_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "e.jsonl"
    write(path, [record()])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UsageError, match="line 2"):
        read_file(path)


WRONG = {
    "kind": "mla9",
    "mode": "nosuch",
    "status": "great",
    "graph": "paper",
    "backend": "a|b",
    "device": "",
    "case": "nonsense",
    "case ": "decode-p16-prefix99999999999-new1-h4x2x128-bf16-shuffled",
    "case_hash": "0" * 16,
    "controls": {"mask": [2, 1]},
    "controls ": {"mask": [-1, 1]},
    "seconds": "long",
    "a_field_of_another_program": 1,
}


@pytest.mark.parametrize("field", WRONG)
def test_what_no_run_records_is_refused_by_file_line_and_field(tmp_path: Path, field: str) -> None:
    path = tmp_path / "e.jsonl"
    good = msgspec.to_builtins(record())
    path.write_bytes(msgspec.json.encode(good) + b"\n" + msgspec.json.encode({**good, field.strip(): WRONG[field]}) + b"\n")
    with pytest.raises(UsageError, match=f"e.jsonl', line 2: .*{field.strip().partition('_hash')[0]}"):
        read_file(path)


def test_a_file_without_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text("")
    with pytest.raises(UsageError, match="holds no record"):
        read(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no evidence"):
        read(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_no_part(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    write(path, [record()])
    before = path.read_bytes()
    broken = record(versions={"torch": object()})
    with pytest.raises(TypeError):
        write(path, [broken])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["e.jsonl"]


def test_the_latest_record_of_a_key_wins() -> None:
    old, new = record(fingerprint="a", status="fail"), record(fingerprint="b", utc="2026-01-02T00:00:00Z")
    assert merge([new, old]) == [new]


def test_two_statuses_of_the_same_code_are_flaky() -> None:
    merged = merge([record(), record(status="fail", utc="2026-01-02T00:00:00Z")])
    assert [r.status for r in merged] == ["flaky"]
    assert "pass at" in merged[0].reason
    assert "fail at" in merged[0].reason


@pytest.mark.parametrize(
    "change",
    [
        {"device": "NVIDIA H200"},
        {"versions": {"torch": "2.11"}},
        {"graph": "cuda"},
        {"case_hash": "1"},
        {"mode": "verify"},
        {"backend": "x"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_part_of_the_key_keeps_records_apart(change: dict[str, object]) -> None:
    assert len(merge([record(), record(**change)])) == 2


def test_a_record_of_a_row_that_returns_nan_can_be_read_back(tmp_path: Path) -> None:
    class Broken(TorchSoftmax):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
            return super().forward(q, k, v, layer_id, batch) * float("nan")

    row = Row(name="broken", kind=AttentionKind.SOFTMAX, create=Broken, source=__file__)
    found = run_and_record(CellId(row, RunnerMode.EAGER, seed_layouts(AttentionKind.SOFTMAX)[0]), "cpu")
    assert found.status == "fail"
    write(tmp_path / "e.jsonl", [found])
    assert read_file(tmp_path / "e.jsonl") == [found]
    RECORD_KEY.pair(found)


def test_records_name_no_folder_of_the_machine() -> None:
    told = (
        "Error in f at /opt/x/.venv/lib/python3.12/site-packages/pkg/a.cuh:697; -isystem/home/me/venv/site-packages/b `/tmp/w/.cache/pkg/c`"
    )
    assert portable(told) == "Error in f at site-packages/pkg/a.cuh:697; -isystemsite-packages/b `.cache/pkg/c`"
