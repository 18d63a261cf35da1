"""The harness translates a row's declared conventions; a row that follows others than it declares is red."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends.torch_lightning import TorchLightning
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.cell import CellResult, run_cell
from attnmatrix.harness.context import Context
from attnmatrix.harness.registry import Row

CPU = torch.device("cpu")
SOFTMAX = Case(ForwardMode.EXTEND, 4, (9, 0), (3, 6), Heads(4, 2, 64), window=4)
LIGHTNING = Case(ForwardMode.EXTEND, 4, (9, 0), (3, 6), Heads(2, 2, 64), kind=AttentionKind.LIGHTNING)


class CountsKeysBefore(TorchSoftmax):
    """A package whose window counts the keys before the query's own."""

    def __init__(self, context: Context) -> None:
        super().__init__(replace(context, windows=tuple(None if w is None else w + 1 for w in context.windows)))


class Flat(TorchSoftmax):
    """A package that returns ``[T, H * D]``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q, k, v, layer_id, batch).flatten(1)


class IgnoresLayout(TorchLightning):
    """Reads and writes the pool as ``[slots, H, K, V]`` whatever was declared."""

    def __init__(self, context: Context) -> None:
        states = copy.copy(context.states)
        assert states is not None
        states.layout = "KV"
        super().__init__(replace(context, states=states))


def run(backend: type[AttentionBackend], case: Case, **conventions: str) -> CellResult:
    row = Row(backend.__name__, case.kind, backend, conventions=Conventions(**conventions), source=__file__)  # type: ignore[arg-type]
    return run_cell(row, RunnerMode.EAGER, case, CPU, controls=(), diagnosed=False)


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
def test_kv_layouts(layout: str) -> None:
    assert run(TorchSoftmax, SOFTMAX, kv_layout=layout).reason == ""


@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_state_layouts(layout: str) -> None:
    assert run(TorchLightning, LIGHTNING, state_layout=layout).reason == ""


def test_a_state_layout_that_is_not_followed_is_red() -> None:
    assert run(IgnoresLayout, LIGHTNING, state_layout="KV").reason == ""
    assert run(IgnoresLayout, LIGHTNING, state_layout="VK").status == "fail"


def test_an_exclusive_window_is_one_smaller() -> None:
    assert run(CountsKeysBefore, SOFTMAX, window="exclusive").reason == ""
    assert run(CountsKeysBefore, SOFTMAX, window="inclusive").status == "fail"
    assert run(TorchSoftmax, SOFTMAX, window="exclusive").status == "fail"


def test_a_flat_output_is_seen_per_head() -> None:
    assert run(Flat, SOFTMAX, output="flat").reason == ""
    assert run(TorchSoftmax, SOFTMAX, output="flat").status == "fail"


@pytest.mark.parametrize(
    ("name", "value"), [("kv_layout", "NDH"), ("state_layout", "KK"), ("output", "flattened"), ("window", "both"), ("lse_base", "10")]
)
def test_an_unknown_convention_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is one of .*, got '{value}'"):
        Conventions(**{name: value})  # type: ignore[arg-type]
