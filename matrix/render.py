"""MATRIX.md from evidence."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.adapted_modes import ADAPTED_MODES
from attnmatrix.harness.properties import PROPERTIES
from attnmatrix.harness.registry import UsageError, find_row, rows
from attnmatrix.harness.row_suite import in_dtypes_of, is_sampled, row_suite
from attnmatrix.matrix.healthy import Healthy
from attnmatrix.matrix.kill_score import KillScore, side_by_side
from attnmatrix.matrix.record import Record
from attnmatrix.matrix.run import current_fingerprint
from attnmatrix.matrix.status import AS_DECLARED, ORDER, Cell, short_device, summarise

HERE = Path(__file__).resolve().parent
MATRIX_FILE = HERE / "MATRIX.md"
RULES = {
    "ours": "this harness",
    "fixed": "fixed tolerances (ten layouts, zeros in unused slots, atol = rtol = 3e-2, 1e-1 in graph and verify modes)",
}


@dataclass(frozen=True)
class Table:
    """One attention kind: its rows, each with one text per runner mode."""

    kind: str
    rows: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class PairTable:
    """Handoffs of one kind on one device: for each prefill row one text per decode row."""

    kind: str
    device: str
    decodes: list[str]
    rows: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Reason:
    """Why cases are not plain passes: one line for each distinct reason of a row on a device, with the modes that met it."""

    row: str
    modes: list[str]
    device: str
    status: str
    count: int
    reason: str
    diagnosis: str
    example: str


def render_matrix(records: Sequence[Record], scores: Mapping[str, KillScore] | None = None, healthy: Healthy | None = None) -> str:
    """The whole page; every cell comes from ``records``, rows without any show ``–``. ``scores``: kill scores by rule."""
    statuses = [status_now(record) for record in records]
    reasons = _reasons(records, statuses)
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters["cell"] = lambda text: text.replace("|", "\\|").replace("\n", " ")
    return environment.get_template("matrix.md.j2").render(
        modes=list(RunnerMode),
        tables=_tables(records, statuses),
        pairs=_pairs(records, statuses),
        margins=_margins(records, statuses),
        properties=_properties(records),
        property_names=PROPERTIES,
        unbuilt=[mode.column for mode in RunnerMode if mode not in ADAPTED_MODES],
        open_reasons=[reason for reason in reasons if reason.status not in AS_DECLARED],
        declared_reasons=[reason for reason in reasons if reason.status in AS_DECLARED],
        environments=_environments(records),
        kills=side_by_side(scores or {}),
        rules=[rule for rule in RULES if rule in (scores or {})],
        scores=scores or {},
        healthy=healthy,
        total=len(records),
        declared=sum(status in AS_DECLARED for status in statuses),
    )


def row_names(records: Sequence[Record], kind: AttentionKind) -> list[str]:
    """Registered rows of a kind, then rows that only the records know, pairs among them that were run in more than handoffs."""
    handoff = RunnerMode.HANDOFF.value
    recorded = {r.backend: None for r in records if r.kind == kind.value and ("," not in r.backend or r.mode != handoff)}
    return list({row.name: None for row in rows() if row.kind is kind} | recorded)


def status_now(record: Record) -> str:
    """The record's status, ``stale`` for a verdict of other code; a row that is not registered here cannot be checked."""
    current = current_fingerprint(AttentionKind(record.kind), record.backend, RunnerMode(record.mode), record.device_type)
    return record.status if current in (None, record.fingerprint) else "stale"


def _tables(records: Sequence[Record], statuses: Sequence[str]) -> list[Table]:
    grouped = cells_of(records, statuses)
    tables = []
    for kind in AttentionKind:
        body = []
        for name in row_names(records, kind):
            texts = []
            for mode in RunnerMode:
                found = grouped.get((kind.value, name, mode.value), [])
                texts.append("<br>".join(cell.text() for cell in found) or "–")
            body.append((name, texts))
        tables.append(Table(kind.value, body))
    return tables


def _pairs(records: Sequence[Record], statuses: Sequence[str]) -> list[PairTable]:
    """For each kind and device that pairs ``prefill,decode`` were run on: prefill rows by decode columns, what their handoff came to."""
    groups: dict[tuple[str, str], dict[tuple[str, str], Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for record, status in zip(records, statuses, strict=True):
        if "," in record.backend and record.mode == RunnerMode.HANDOFF.value:
            prefill, decode = record.backend.split(",")
            groups[record.kind, short_device(record.device)][prefill, decode][status] += 1
    tables = []
    for (kind, device), found in sorted(groups.items()):
        prefills, decodes = (sorted({pair[side] for pair in found}) for side in (0, 1))
        body = [(name, [_counts(found.get((name, other), Counter())) for other in decodes]) for name in prefills]
        tables.append(PairTable(kind, device, decodes, body))
    return tables


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{found[status]} {status}" for status in ORDER if found[status]) or "–"


def cells_of(records: Sequence[Record], statuses: Sequence[str]) -> dict[tuple[str, str, str], list[Cell]]:
    """Cells by kind, row and mode: one for each device, GPUs first. Each says how many of its cases were not run."""
    groups: dict[tuple[str, str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, record in enumerate(records):
        groups[record.kind, record.backend, record.mode][record.device].append(index)

    def cell(indices: Sequence[int]) -> Cell:
        own = [records[i] for i in indices]
        return summarise(own, [statuses[i] for i in indices], _not_run(own))

    return {
        key: [cell(indices) for _, indices in sorted(devices.items(), key=lambda item: (item[0] == "cpu", item[0]))]
        for key, devices in groups.items()
    }


def _not_run(records: Sequence[Record]) -> int:
    """How many cases the records of one cell on one device leave out. 0 for a row that is not registered here, and where a CPU samples: which
    cases it takes there depends on what is installed."""
    first = records[0]
    try:
        row = find_row(first.backend, AttentionKind(first.kind))
    except UsageError:
        return 0
    if is_sampled(row, first.device_type, full=False):
        return 0
    wanted = in_dtypes_of(row, row_suite(row, RunnerMode(first.mode), first.device_type, full=False))
    return len({case.content_hash for case in wanted} - {record.case_hash for record in records})


def _margins(records: Sequence[Record], statuses: Sequence[str]) -> list[tuple[str, str, str, float, str, str]]:
    """The tightest passing case of each row and device: error over limit, mode, case, and cases judged per second and worker."""
    worst: dict[tuple[str, str, str], Record] = {}
    seconds: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for record, status in zip(records, statuses, strict=True):
        if status == "pass" and record.margin is not None:
            key = (record.kind, record.backend, record.device)
            seconds[key].append(record.seconds)
            if key not in worst or (worst[key].margin or 0) < record.margin:
                worst[key] = record
    return [
        (f"{backend} ({kind})", short_device(device), record.mode, record.margin or 0.0, record.case, _rate(seconds[kind, backend, device]))
        for (kind, backend, device), record in sorted(worst.items())
    ]


def _rate(seconds: Sequence[float]) -> str:
    """Cases per second at the median case: what a warm worker does, first calls and compilation apart."""
    middle = sorted(seconds)[len(seconds) // 2]
    return f"{1 / middle:.2g}" if middle else "–"


def _properties(records: Sequence[Record]) -> list[tuple[str, str, list[str]]]:
    """Per row and device: for each property on how many cases it held of those that can show it."""
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record.properties:
            groups[record.kind, record.backend, record.device].append(record)
    lines = []
    for (kind, backend, device), found in sorted(groups.items()):
        texts = []
        for name in PROPERTIES:
            seen = [record.properties[name] for record in found if name in record.properties]
            texts.append("–" if not seen else f"yes ({len(seen)})" if all(seen) else f"no ({len(seen) - sum(seen)} of {len(seen)})")
        lines.append((f"{backend} ({kind})", short_device(device), texts))
    return lines


def _reasons(records: Sequence[Record], statuses: Sequence[str]) -> list[Reason]:
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record, status in zip(records, statuses, strict=True):
        if status not in ("pass", "stale"):
            diagnosis = _diagnosis(record)
            reason = record.reason
            if status not in AS_DECLARED:
                reason, diagnosis = _numberless(reason), _numberless(diagnosis)
            groups[record.backend, record.kind, record.device, status, reason, diagnosis].append(record)
    ordered = sorted(groups.items(), key=lambda item: (ORDER.index(item[0][3]), item[0]))
    return [_reason(status, found) for (_, _, _, status, _, _), found in ordered]


def _reason(status: str, found: Sequence[Record]) -> Reason:
    """The line of records that fail alike; the example is the one with the shortest id, which gives the numbers."""
    modes = [mode.value for mode in RunnerMode]
    example = min(found, key=lambda record: (len(record.case), record.case, modes.index(record.mode)))
    return Reason(
        row=f"{example.backend} ({example.kind})",
        modes=sorted({record.mode for record in found}, key=modes.index),
        device=short_device(example.device),
        status=status,
        count=len(found),
        reason=example.reason,
        diagnosis=_diagnosis(example),
        example=example.case,
    )


def _diagnosis(record: Record) -> str:
    return re.split(", error |; nearest", record.diagnosis)[0]


def _numberless(text: str) -> str:
    """``text`` without its measured numbers; names with digits, such as Y80, stay."""
    return re.sub(r"(?<![A-Za-z_\d.])\d+(\.\d+)?(e[+-]?\d+)?", "#", text)


def _environments(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Each distinct combination of device and versions, with its rows and record count."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for r in records:
        device = short_device(r.device) + (f" (SM {r.capability}, driver {r.driver})" if r.capability else "")
        revision = r.revision + (" + local changes" if r.dirty else "")
        groups[device, r.python, r.torch, r.triton, revision].append(r)
    lines = []
    for key, found in sorted(groups.items()):
        packages = sorted({f"{name} {version}" for r in found for name, version in r.versions.items() if name != "torch"})
        span = f"{min(r.utc for r in found)[:16]} to {max(r.utc for r in found)[:16]}"
        lines.append((*key, ", ".join(packages) or "–", str(len(found)), span))
    return lines
