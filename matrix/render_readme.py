"""The generated parts of README.md: short tables and kill scores, between their markers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.adapted_modes import ADAPTED_MODES
from attnmatrix.harness.registry import UsageError
from attnmatrix.matrix.kill_score import KillScore
from attnmatrix.matrix.record import Record
from attnmatrix.matrix.render import HERE, RULES, cells_of, row_names, status_now

README_FILE = HERE.parent / "README.md"


def render_readme(records: Sequence[Record], readme: str, scores: Mapping[str, KillScore] | None = None) -> str:
    """``readme`` with the short tables and the kill scores between their markers; only the modes that have an adapter.

    Raises UsageError without markers.
    """
    return _between(_between(readme, "matrix", _short_tables(records)), "kill-score", _short_scores(scores or {}))


def _between(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise UsageError(f"README.md has no {begin} ... {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def _short_scores(scores: Mapping[str, KillScore]) -> str:
    lines = ["", "| judged by | planted faults killed |", "|---|---|"]
    lines += [
        f"| {RULES[rule]} | {scores[rule].killed} of {scores[rule].total} ({scores[rule].percent:.1f} %) |"
        for rule in RULES
        if rule in scores
    ]
    return "\n".join([*lines, ""])


def _short_tables(records: Sequence[Record]) -> str:
    grouped = cells_of(records, [status_now(record) for record in records])
    modes = [mode for mode in RunnerMode if mode in ADAPTED_MODES]
    lines = []
    for kind in AttentionKind:
        lines += ["", f"| {kind.value} | " + " | ".join(mode.column for mode in modes) + " |", "|---|" + "---|" * len(modes)]
        for name in row_names(records, kind):
            cells = [grouped.get((kind.value, name, mode.value), []) for mode in modes]
            lines.append(f"| `{name}` | " + " | ".join("<br>".join(cell.short() for cell in found) or "–" for found in cells) + " |")
    return "\n".join([*lines, ""])
