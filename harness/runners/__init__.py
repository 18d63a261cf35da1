"""Runner-mode adapters: how an engine drives a backend, one file per adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.runners.eager import run_eager
from attnmatrix.harness.runners.recorder import StepRun
from attnmatrix.harness.world import World

Runner = Callable[[World, AttentionBackend], Iterator[StepRun]]

RUNNERS: dict[RunnerMode, Runner] = {
    RunnerMode.EAGER: run_eager,
    RunnerMode.VERIFY: run_eager,
}
"""The adapter of each runner mode that has one."""
