"""The record of one cell's run: what evidence files hold, one JSON object a line."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.cell import CellResult
from attnmatrix.harness.measure import Measurement
from attnmatrix.harness.trial import Trial
from attnmatrix.matrix.environment import Environment


class Worst(msgspec.Struct, frozen=True):
    """The row with the largest error/limit ratio of one quantity under one probe, with all that its limit was made of."""

    quantity: str
    step: int
    layer: int
    rows: int
    ratio: float | None  # None, here and below: not finite
    error: float | None
    limit: float | None
    baseline: float | None
    median: float | None
    uninformative: int
    where: str


class ProbeRecord(msgspec.Struct, frozen=True):
    """One probe: the worst row of each quantity, what the guards said, and the exception's text if one ended it."""

    name: str
    worst: list[Worst]
    problems: list[str]
    error: str = ""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of one case by one row in one mode. ``case_hash`` with row, mode, device, graph kind and versions is the key."""

    backend: str
    mode: str
    kind: str
    status: str
    case: str
    case_hash: str
    case_name: str
    device: str
    capability: str
    graph: str
    versions: dict[str, str]
    reason: str
    diagnosis: str
    details: list[str]
    margin: float | None
    probes: list[ProbeRecord]
    controls: dict[str, tuple[int, int]]  # kind -> rejected, tried
    properties: dict[str, bool]  # property -> whether it held
    replays: int
    fingerprint: str
    python: str
    torch: str
    triton: str
    driver: str
    revision: str
    dirty: bool
    utc: str
    seconds: float
    where: str = ""  # request, position, head, page and slot of the worst row, and how the bad rows are spread

    @property
    def key(self) -> tuple[Any, ...]:
        versions = tuple(sorted(self.versions.items()))
        return (self.kind, self.backend, self.mode, self.case_hash, self.device, self.capability, self.graph, versions)

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``; ``device`` is a GPU's own name."""
        return "cpu" if self.device == "cpu" else "cuda"


def make_record(result: CellResult, kind: AttentionKind, versions: dict[str, str], environment: Environment, fingerprint: str) -> Record:
    """The record of a finished cell."""
    margins = [trial.margin for trial in result.trials if trial.margin is not None]
    graphs = [trial.graph for trial in result.trials if trial.graph != "none"]
    return Record(
        **_identity(result.row, result.mode, result.case, kind, environment, versions),
        status=result.status,
        graph=graphs[0] if graphs else "none",
        reason=portable(result.reason),
        diagnosis=result.diagnosis,
        details=[portable(line) for line in result.details],
        margin=_finite(max(margins, default=None)),
        probes=[_probe(trial) for trial in result.trials],
        controls={kind: (count.rejected, count.tried) for kind, count in result.controls.items()},
        properties={found.name: found.holds for found in result.properties},
        replays=sum(trial.replays for trial in result.trials),
        fingerprint=fingerprint,
        seconds=round(result.seconds, 4),
        where=result.where,
    )


def make_crash_record(
    row: str,
    mode: RunnerMode,
    case: Case,
    kind: AttentionKind,
    versions: dict[str, str],
    environment: Environment,
    fingerprint: str,
    reason: str,
) -> Record:
    """The record of a cell that took its process with it."""
    return Record(
        **_identity(row, mode, case, kind, environment, versions),
        status="crash",
        graph="none",
        reason=reason,
        diagnosis="",
        details=[],
        margin=None,
        probes=[],
        controls={},
        properties={},
        replays=0,
        fingerprint=fingerprint,
        seconds=0.0,
    )


def _identity(
    row: str, mode: RunnerMode, case: Case, kind: AttentionKind, environment: Environment, versions: dict[str, str]
) -> dict[str, Any]:
    return {
        "backend": row,
        "mode": mode.value,
        "kind": kind.value,
        "case": case.id,
        "case_hash": case.content_hash,
        "case_name": case.name,
        "versions": versions,
        "utc": environment.now(),
        **environment.stamp(),
    }


def portable(text: str) -> str:
    """The text without the folders of the machine it came from: paths begin at ``site-packages`` or the cache's name."""
    return re.sub(r"/[^\s'\"`,:=]*/(site-packages|\.cache)/", r"\1/", text)


def _finite(value: float | None) -> float | None:
    """Four significant digits; None for what JSON has no number for."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def _probe(trial: Trial) -> ProbeRecord:
    worst: dict[str, Worst] = {}
    for verdict in trial.verdicts:
        for measurement in verdict.measurements:
            if measurement.error.numel():
                found = _worst(measurement)
                known = worst.get(found.quantity)
                if known is None or _rank(found) > _rank(known):
                    worst[found.quantity] = found
    problems = [problem for verdict in trial.verdicts for problem in verdict.problems]
    error = f"{type(trial.error).__name__}: {trial.error}" if trial.error is not None else ""
    return ProbeRecord(trial.probe, list(worst.values()), problems[:20], portable(error)[:2000])


def _rank(worst: Worst) -> float:
    return float("inf") if worst.ratio is None else worst.ratio


def _worst(m: Measurement) -> Worst:
    row = m.worst
    return Worst(
        quantity=m.quantity,
        step=m.step,
        layer=m.layer,
        rows=m.error.numel(),
        ratio=_finite(float(m.ratio[row])),
        error=_finite(float(m.error[row])),
        limit=_finite(float(m.limit[row])),
        baseline=_finite(float(m.baseline[row])),
        median=_finite(float(m.baseline.median())),
        uninformative=m.uninformative,
        where=m.where(row),
    )
