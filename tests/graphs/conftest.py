"""Graph tests: Triton in its interpreter, one thread, and a way to run a row that can be broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.cell import CellResult, run_cell
from attnmatrix.harness.interpreter import prepare_triton
from attnmatrix.harness.registry import Row

prepare_triton(torch.device("cpu"), interpreted=False)  # before torch imports Triton


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors on shared machines: threads cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def outcome() -> Callable[..., CellResult]:
    """Runs one cell of a backend class whose ``broken`` attribute switches its fault on or off."""

    def run(backend: type[AttentionBackend], broken: bool, mode: RunnerMode, case: Case) -> CellResult:
        create = type(backend.__name__, (backend,), {"broken": broken})
        row = Row(name="faulty", kind=case.kind, create=create, source=__file__)
        return run_cell(row, mode, case, torch.device("cpu"), controls=(), diagnosed=False)

    return run
