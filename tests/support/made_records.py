"""Records made by hand for the tests of evidence, statuses and rendering."""

from __future__ import annotations

import msgspec

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.controls import control_kinds
from attnmatrix.harness.registry import find_row
from attnmatrix.matrix.record import Record
from attnmatrix.matrix.run import cell_fingerprint

CASE = "decode-p16-prefix14.15.16-new1.1.1-h4x2x128-bf16-shuffled"


def record(**changes: object) -> Record:
    """A passing record of the torch row, judged by the present code, with some fields changed."""
    mode = RunnerMode(changes.get("mode", "eager"))
    case = parse_case(str(changes.get("case", CASE)))
    base = Record(
        backend="torch",
        mode=mode.value,
        kind=case.kind.value,
        status="pass",
        case=case.id,
        case_hash=case.content_hash,
        case_name="decode_page_boundary",
        device="cpu",
        capability="",
        graph="none",
        versions={"torch": "2.13.0"},
        reason="",
        diagnosis="",
        details=[],
        margin=0.4,
        probes=[],
        controls=dict.fromkeys(sorted(control_kinds(parse_case(CASE))), (1, 1)),
        properties={},
        replays=0,
        fingerprint=cell_fingerprint(find_row("torch", AttentionKind.SOFTMAX), mode, "cpu"),
        python="3.11.7",
        torch="2.13.0",
        triton="3.7.1",
        driver="",
        revision="abc",
        dirty=False,
        utc="2026-01-01T00:00:00Z",
        seconds=0.1,
    )
    return msgspec.structs.replace(base, **changes)
