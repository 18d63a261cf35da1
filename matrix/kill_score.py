"""The kill score as a report: of the judgement of the matrix, or of a fixed-tolerance suite on the same faults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
from tabulate import tabulate

from attnmatrix.harness.faults.fault import faults, not_injected
from attnmatrix.harness.faults.score import CRASHED, KILLED, FaultScore, check_rule, score_fault
from attnmatrix.matrix.kept import keep, read_kept
from attnmatrix.matrix.workers import worker_pool


class Survivor(msgspec.Struct, frozen=True):
    """A fault that no case rejected, or that ended in an exception."""

    fault: str
    kind: str
    title: str
    reason: str


class KillScore(msgspec.Struct, frozen=True):
    """One rule's score. ``by_kind``: killed and total; ``pending`` and ``equivalent`` are listed but not run."""

    rule: str
    killed: int
    total: int
    by_kind: dict[str, tuple[int, int]]
    survivors: list[Survivor]
    crashed: list[Survivor]
    pending: list[Survivor]
    equivalent: list[Survivor]
    out_of_scope: list[Survivor]
    seconds: float
    scores: list[FaultScore]

    @property
    def percent(self) -> float:
        return 100 * self.killed / self.total if self.total else 100.0


def kill_score(rule: str, kinds: Collection[str], workers: int, progress: Callable[[str], None]) -> KillScore:
    """Run every fault (of some kinds) until it is rejected; ``progress`` gets a line for each. Raises UsageError for an unknown rule or kind."""
    check_rule(rule, kinds)
    chosen = [fault for fault in faults() if not kinds or fault.kind in kinds]
    with worker_pool(workers) as pool:
        scores = []
        for number, found in enumerate(pool.map(_score, [(fault.id, rule) for fault in chosen]), start=1):
            scores.append(found)
            progress(f"{number:3d}/{len(chosen)} {found.fault:12s} {found.outcome}, {found.tried} cases, {found.seconds:.1f} s")
    titles = {fault.id: fault.title for fault in chosen}
    by_kind: dict[str, tuple[int, int]] = {}
    for found in scores:
        killed, total = by_kind.get(found.kind, (0, 0))
        by_kind[found.kind] = killed + (found.outcome == KILLED), total + 1
    alive = [Survivor(s.fault, s.kind, titles[s.fault], s.reason or s.outcome) for s in scores if s.outcome not in (KILLED, CRASHED)]
    crashed = [Survivor(s.fault, s.kind, titles[s.fault], s.reason) for s in scores if s.outcome == CRASHED]
    aside = {status: _aside(status, kinds) for status in ("pending", "equivalent", "out of scope")}
    return KillScore(
        rule=rule,
        killed=sum(s.outcome == KILLED for s in scores),
        total=len(scores),
        by_kind=dict(sorted(by_kind.items())),
        survivors=alive,
        crashed=crashed,
        pending=aside["pending"],
        equivalent=aside["equivalent"],
        out_of_scope=aside["out of scope"],
        seconds=round(sum(s.seconds for s in scores), 1),
        scores=scores,
    )


def _score(task: tuple[str, str]) -> FaultScore:
    fault, rule = task
    return score_fault(next(known for known in faults() if known.id == fault), rule)


def _aside(status: str, kinds: Collection[str]) -> list[Survivor]:
    return [Survivor(n.id, n.kind, n.title, n.reason) for n in not_injected() if n.status == status and (not kinds or n.kind in kinds)]


def report(found: KillScore) -> str:
    """The score as text: by kind, then each fault that lives, crashed or waits."""
    by_kind: dict[str, list[FaultScore]] = {}
    for entry in found.scores:
        by_kind.setdefault(entry.kind, []).append(entry)
    rows = [
        [kind, f"{killed}/{total}", sum(s.tried for s in by_kind[kind]), f"{sum(s.seconds for s in by_kind[kind]):.1f}"]
        for kind, (killed, total) in found.by_kind.items()
    ]
    lines = [tabulate(rows, headers=["kind", "killed", "cases", "seconds"]), ""]
    lines.append(
        f"rule {found.rule}: {found.killed} of {found.total} faults killed ({found.percent:.1f} %), {len(found.crashed)} ended in an exception"
    )
    for name, group in (
        ("survived", found.survivors),
        ("ended in an exception", found.crashed),
        ("pending", found.pending),
        ("equivalent", found.equivalent),
        ("out of scope", found.out_of_scope),
    ):
        lines += [f"{name}: {entry.fault} {entry.title} - {entry.reason}" for entry in group]
    return "\n".join(lines)


def save(found: KillScore, path: Path) -> None:
    """Keep the score in a file of scores by rule."""
    keep(path, {**load(path), found.rule: found})


def load(path: Path) -> dict[str, KillScore]:
    """Scores by rule, none when there is no such file. Raises UsageError when it cannot be read."""
    return read_kept(path, dict[str, KillScore]) if path.is_file() else {}


def side_by_side(scores: Mapping[str, KillScore]) -> list[tuple[str, Sequence[str]]]:
    """Rows of a table: kind, then killed/total under each rule; the last row sums up."""
    if not scores:
        return []
    rules = [rule for rule in ("ours", "fixed") if rule in scores]
    kinds = sorted({kind for rule in rules for kind in scores[rule].by_kind})
    rows: list[tuple[str, Sequence[str]]] = [
        (kind, ["{}/{}".format(*scores[rule].by_kind[kind]) if kind in scores[rule].by_kind else "–" for rule in rules]) for kind in kinds
    ]
    rows.append(("**all**", [f"**{scores[rule].killed}/{scores[rule].total}** ({scores[rule].percent:.1f} %)" for rule in rules]))
    return rows
