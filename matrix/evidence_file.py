"""Evidence files: JSON lines, written whole or not at all, merged by key."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from attnmatrix.harness.registry import UsageError
from attnmatrix.matrix.record import Record
from attnmatrix.matrix.record_check import record_problem
from attnmatrix.matrix.whole_file import check_place, write_whole

COMMITTED = Path(__file__).resolve().parent / "evidence"

_decoder = msgspec.json.Decoder(Record)
_encoder = msgspec.json.Encoder(order="deterministic")


def read_file(path: Path) -> list[Record]:
    """Records of one file. Raises UsageError naming file and line when it is not whole, or holds something that no run records."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read evidence {str(path)!r}: {error.strerror}") from error
    if b"\0" in lines[0]:
        raise UsageError(f"evidence {str(path)!r} is no text: expected JSON lines")
    if lines[-1]:
        raise UsageError(f"evidence {str(path)!r} is truncated: line {len(lines)} does not end")
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"evidence {str(path)!r}, line {number}: {error}") from error
        problem = record_problem(record)
        if problem:
            raise UsageError(f"evidence {str(path)!r}, line {number}: {problem}")
        records.append(record)
    if not records:
        raise UsageError(f"evidence {str(path)!r} holds no record")
    return records


def read(path: Path) -> list[Record]:
    """Records of one file, or of all ``*.jsonl`` of a folder. Raises UsageError when there is nothing to read."""
    if not path.is_dir():
        return read_file(path)
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise UsageError(f"no evidence (*.jsonl) in {str(path)!r}")
    return merge([record for file in files for record in read_file(file)])


def merge(records: Iterable[Record]) -> list[Record]:
    """One record per key, the latest; two different statuses of the same code under one key make it ``flaky``."""
    latest: dict[tuple[object, ...], Record] = {}
    for record in sorted(records, key=lambda record: record.utc):
        known = latest.get(record.key)
        if known is not None and known.fingerprint == record.fingerprint and known.status != record.status:
            reason = f"{known.status} at {known.utc}, {record.status} at {record.utc}"
            latest[record.key] = msgspec.structs.replace(record, status="flaky", reason=reason)
        else:
            latest[record.key] = record
    return sorted(latest.values(), key=lambda record: tuple(map(str, record.key)))


def check_evidence_place(path: Path) -> None:
    """Make the folder of evidence to write; called before a run. Raises UsageError when no file can be written there, and for a file that holds
    something else."""
    check_place(path)
    if path.is_file() and path.stat().st_size:
        try:
            read_file(path)
        except UsageError as error:
            raise UsageError(f"will not overwrite {str(path)!r}, which is no evidence: {error}") from error


def write(path: Path, records: Iterable[Record]) -> None:
    """Write records to ``path`` in key order; a reader sees the old file or the new one, never a part."""
    write_whole(path, b"".join(_encoder.encode(record) + b"\n" for record in merge(records)))
