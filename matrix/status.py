"""Case statuses, their order, and what a cell made of many cases shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnmatrix.cases.ids import parse_case
from attnmatrix.harness.controls import control_kinds

if TYPE_CHECKING:
    from attnmatrix.matrix.record import Record

ORDER = ("crash", "fail", "vacuous", "flaky", "known", "stale", "pass", "deferred", "blocked", "n/a", "untested")
"""Worst first; a cell shows the first of these that any of its cases has."""

AS_DECLARED = frozenset({"pass", "known", "blocked", "deferred", "n/a"})
"""Statuses that agree with the row's own declaration; anything else makes a run exit with 1."""

REFUSED = ("blocked", "deferred", "n/a")
"""Statuses of cases that a row does not claim."""

MARKS = {
    "crash": "💥", "fail": "✗", "vacuous": "∅", "flaky": "≈", "known": "✗", "stale": "·", "pass": "✓",
    "deferred": "deferred", "blocked": "blocked", "n/a": "n/a", "untested": "–",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """All cases of one row in one mode on one device, summed up."""

    status: str
    counts: dict[str, int]
    axes: str
    device: str
    graph: str
    margin: float | None
    controls: tuple[int, int]
    reason: str
    not_run: int
    """Cases of the cell on that device of which there is no record."""

    @property
    def judged(self) -> int:
        """Cases with a verdict of their own on this code: everything but the stale, refusals, deferrals and the inapplicable."""
        return sum(count for status, count in self.counts.items() if status not in ("stale", *REFUSED, "untested"))

    def text(self) -> str:
        """The cell as shown: ``✓ 84 · p1-64 d64/128 bf16/fp16 · H200 · 0.41``, ``✗ 2 known / 80``, ``blocked: reason``."""
        if self.status in REFUSED:
            return f"{self.status}: {self.reason}{self._aside()}"
        parts = [self._counts(), self.axes, short_device(self.device)]
        if self.graph != "none":
            parts[-1] += f" {self.graph}"
        if self.margin is not None:
            parts.append(f"{self.margin:.2f}")
        if self.controls[1]:
            parts.append(f"{self.controls[0]}/{self.controls[1]}")
        if self.status == "vacuous":
            parts.append(self.reason)
        return " · ".join(parts)

    def short(self) -> str:
        """The cell in a narrow table: ``✓ 84 H200``, ``✗ 2 known / 80 CPU tape``, ``blocked``."""
        if self.status in REFUSED:
            return self.status + self._aside()
        return f"{self._counts()} {short_device(self.device)}" + (f" {self.graph}" if self.graph != "none" else "")

    def _counts(self) -> str:
        if self.status == "pass":
            shown = f"✓ {self.counts['pass']}"
        elif self.status == "stale":
            stale = self.counts["stale"]
            shown = f"stale {stale}" + (f" / {stale + self.judged}" if self.judged else "")
        else:
            worst = [s for s in ORDER[: ORDER.index("stale")] if s in self.counts]
            named = " ".join(f"{self.counts[s]} {s}" for s in worst)
            shown = f"{MARKS[self.status]} {named} / {self.judged}"
        return shown + self._aside("stale", *REFUSED)

    def _aside(self, *statuses: str) -> str:
        """What a cell has beside its status, of these ``statuses`` and of cases that were not run: `` (+ 4 blocked, 3 not run)``."""
        aside = [f"{self.counts[s]} {s}" for s in statuses if s in self.counts and s != self.status]
        aside += [f"{self.not_run} not run"] if self.not_run else []
        return f" (+ {', '.join(aside)})" if aside else ""


def summarise(records: Sequence[Record], statuses: Sequence[str], not_run: int = 0) -> Cell:
    """The cell of records that share row, mode and device; ``statuses`` are theirs, staleness applied. ``not_run``: see :class:`Cell`."""
    counts = Counter(statuses)
    status = next(s for s in ORDER if s in counts)
    untried = _untried_controls(records, statuses) if status == "pass" else []
    if untried:
        status = "vacuous"
        counts["vacuous"] = counts.pop("pass")
    told = list(zip(records, statuses, strict=True))
    reasons = Counter(r.reason for r, s in told if s == status and r.reason)
    margins = [r.margin for r, s in told if r.margin is not None and s in ("pass", "known")]
    shown = [(r, s) for r, s in told if s != "stale"]
    if all(s in REFUSED for _, s in shown):  # what is left of a stale cell is what it was
        shown = told
    controls = [pair for record, _ in shown for pair in record.controls.values()]
    graphs = sorted({r.graph for r in records} - {"none"})
    return Cell(
        status=status,
        counts=dict(counts),
        axes=axes([r for r, s in shown if s not in REFUSED]),
        device=records[0].device,
        graph="/".join(graphs) or "none",
        margin=max(
            (r.margin for r, s in told if r.margin is not None and s == "pass"),
            default=max(margins, default=None),
        ),
        controls=(sum(c[0] for c in controls), sum(c[1] for c in controls)),
        reason=f"no negative control of kind {', '.join(untried)} was tried"
        if untried
        else reasons.most_common(1)[0][0]
        if reasons
        else "",
        not_run=not_run,
    )


def _untried_controls(records: Sequence[Record], statuses: Sequence[str]) -> list[str]:
    """Kinds of controls that apply to some passing case of a cell and that none of its cases tried (and saw run to its end)."""
    passed = [record for record, status in zip(records, statuses, strict=True) if status == "pass"]
    relevant = {kind for record in passed for kind in control_kinds(parse_case(record.case))}
    return sorted(relevant - {kind for record in passed for kind, (_, tried) in record.controls.items() if tried})


def axes(records: Iterable[Record]) -> str:
    """What the cases cover: page sizes, head dims, dtypes, dtypes of quantised caches, draft kinds."""
    cases = [parse_case(record.case) for record in records]
    if not cases:
        return ""
    pages, dims = sorted({c.page_size for c in cases}), sorted({c.heads.dim for c in cases})
    dtypes = [d for d in ("bf16", "fp16", "fp32") if d in {c.dtype for c in cases}]
    drafts = sorted({c.draft_kind for c in cases if c.draft_kind})
    span = f"p{pages[0]}" if len(pages) == 1 else f"p{pages[0]}-{pages[-1]}"
    words = [span, "d" + "/".join(map(str, dims)), "/".join(dtypes), *sorted({f"kv{c.kv_dtype}" for c in cases if c.kv_dtype})]
    return " ".join(words + (["/".join(drafts)] if drafts else []))


def short_device(device: str) -> str:
    """``NVIDIA H200`` as ``H200``, ``cpu`` as ``CPU``."""
    return "CPU" if device == "cpu" else device.removeprefix("NVIDIA ")
