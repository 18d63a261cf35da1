"""The runner modes that have an adapter; torch-free, for listing and collecting."""

from __future__ import annotations

from attnmatrix.cases.modes import RunnerMode

ADAPTED_MODES = frozenset(
    {
        RunnerMode.EAGER,
        RunnerMode.VERIFY,
        RunnerMode.CG_DECODE,
        RunnerMode.VERIFY_CG,
        RunnerMode.PCG_EXTEND,
        RunnerMode.BCG_EXTEND,
        RunnerMode.HANDOFF,
    }
)
"""Keys of ``RUNNERS``."""
