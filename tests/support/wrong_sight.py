"""A row that sees what it should not, or not what it should, and what becomes of a row on a case of the suites."""

from __future__ import annotations

from collections.abc import Callable

import torch
from named_cases import case_named
from torch import Tensor

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.context import Context
from attnmatrix.harness.registry import Row

Sees = Callable[[Context, Tensor, int], Tensor]
"""``(context, visible [R, new, keys], layer)`` to what is seen instead."""


class Seeing(TorchSoftmax):
    """The torch row, which sees what ``sees`` says."""

    def __init__(self, context: Context, sees: Sees) -> None:
        super().__init__(context)
        self.sees = sees

    def _attend(self, q: Tensor, slots: Tensor, visible: Tensor, distance: Tensor, layer: int) -> Tensor:
        return super()._attend(q, slots, self.sees(self.context, visible.clone(), layer), distance, layer)


def keys_of(visible: Tensor) -> int:
    return int(visible.any(dim=1).sum(dim=-1).max())


def first_drafts(visible: Tensor) -> list[int]:
    """Of each request, the index of its first draft token among its keys: that token sees the prefix and itself."""
    return [int(row[0].sum()) - 1 for row in visible]


def status(create: Callable[[Context], AttentionBackend], mode: RunnerMode, name: str) -> str:
    row = Row("wrong", AttentionKind.SOFTMAX, create, source=__file__)
    return run_cell(row, mode, case_named(name, AttentionKind.SOFTMAX, mode), torch.device("cpu"), controls=(), diagnosed=False).status
