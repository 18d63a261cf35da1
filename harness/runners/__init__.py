"""Runner-mode adapters: how an engine drives a backend, one file per adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.runners.breakable import run_breakable
from attnmatrix.harness.runners.decode_graph import run_decode_graph
from attnmatrix.harness.runners.eager import run_eager
from attnmatrix.harness.runners.handoff import run_handoff
from attnmatrix.harness.runners.piecewise import run_piecewise
from attnmatrix.harness.runners.recorder import StepRun
from attnmatrix.harness.world import World

Runner = Callable[[World, AttentionBackend], Iterator[StepRun]]

RUNNERS: dict[RunnerMode, Runner] = {
    RunnerMode.EAGER: run_eager,
    RunnerMode.CG_DECODE: run_decode_graph,
    RunnerMode.PCG_EXTEND: run_piecewise,
    RunnerMode.BCG_EXTEND: run_breakable,
    RunnerMode.VERIFY: run_eager,
    RunnerMode.VERIFY_CG: run_decode_graph,
    RunnerMode.HANDOFF: run_handoff,
}
"""The adapter of each runner mode that has one."""
