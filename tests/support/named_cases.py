"""Cases of the suites by name."""

from __future__ import annotations

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.suites import suite


def case_named(name: str, kind: AttentionKind, mode: RunnerMode) -> Case:
    return next(case for case in suite(kind, mode) if case.name == name)
