"""What is wrong with a record that was read from a file: names that nothing has, and numbers that no run gives."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.matrix.status import ORDER

if TYPE_CHECKING:
    from attnmatrix.matrix.record import Record

GRAPHS = ("none", "tape", "cuda")


def record_problem(record: Record) -> str | None:
    """The first thing wrong with a record whose fields have the right types; None for a good one."""
    return next(_problems(record), None)


def _problems(record: Record) -> Iterator[str]:
    for field, value, known in (
        ("kind", record.kind, tuple(kind.value for kind in AttentionKind)),
        ("mode", record.mode, tuple(mode.value for mode in RunnerMode)),
        ("status", record.status, ORDER),
        ("graph", record.graph, GRAPHS),
    ):
        if value not in known:
            yield f"unknown {field} {value!r}; known: {', '.join(known)}"
    for field, text in (("backend", record.backend), ("device", record.device)):
        if not text or not text.isprintable() or "|" in text:
            yield f"{field} is a name of one line without '|', got {text!r}"
    try:
        kind, content_hash = _identity(record.case)
    except ValueError as error:
        yield str(error)
        return
    if (kind, content_hash) != (record.kind, record.case_hash):
        yield f"case {record.case} is of kind {kind} with hash {content_hash}, not {record.kind} with {record.case_hash}"
    for control, (rejected, tried) in record.controls.items():
        if not 0 <= rejected <= tried:
            yield f"{rejected} of {tried} controls of kind {control!r} rejected"


@cache
def _identity(case_id: str) -> tuple[str, str]:
    """Kind and hash of a case; the same cases come back in every row."""
    case = parse_case(case_id)
    return case.kind.value, case.content_hash
