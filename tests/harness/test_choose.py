"""Aliases and ``auto`` stand for a row that can run; pairs hold each side's conventions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness import registry
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Blocked, Capabilities, Conventions, RoundingStep
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.choose import Place, chosen_rows, create_attention_backend, resolve, why_not_runnable
from attnmatrix.harness.context import Context
from attnmatrix.harness.hybrid import HybridBackend, _pair
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import Row, UsageError, find_row, find_rows
from attnmatrix.harness.world import World
from attnmatrix.matrix.selection import Selection

SOFTMAX, LIGHTNING = AttentionKind.SOFTMAX, AttentionKind.LIGHTNING
CPU, HOPPER, BLACKWELL, ADA = Place("cpu"), Place("cuda", lambda: 9), Place("cuda", lambda: 10), Place("cuda", lambda: 8)
REFUSES = Capabilities(why_not=lambda case: Blocked("all", "RuntimeError", "no"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, AttentionKind], Row]:
    """The registry with rows fa2, fa3, fa4, fi and trtllm whose package, torch, is there; fa3 refuses everything."""
    find_rows("torch")
    rows = dict(registry._ROWS)
    monkeypatch.setattr(registry, "_ROWS", rows)
    for name in ("fa2", "fa3", "fa4", "fi", "trtllm"):
        capabilities = REFUSES if name == "fa3" else Capabilities()
        rows[name, SOFTMAX] = Row(name, SOFTMAX, TorchSoftmax, capabilities, devices=("cuda",), source=__file__)
    return rows


def test_fa_is_the_first_that_can_run(installed: dict[tuple[str, AttentionKind], Row]) -> None:
    assert resolve("fa", HOPPER, "bf16") == "fa4"
    assert why_not_runnable(installed["fa3", SOFTMAX], HOPPER) == "claims no case"
    installed["fa4", SOFTMAX] = Row(
        "fa4", SOFTMAX, TorchSoftmax, distributions=("no-such-distribution",), devices=("cuda",), source=__file__
    )
    assert resolve("fa", HOPPER, "bf16") == "fa2"
    assert resolve("fi,fa", HOPPER, "bf16") == "fi,fa2"


def test_what_keeps_an_alias_from_running_is_named(installed: dict[tuple[str, AttentionKind], Row]) -> None:
    with pytest.raises(UsageError, match=r"'fa': none of fa3, fa4, fa2 can run on cpu \(fa3: needs cuda; fa4: needs cuda"):
        resolve("fa", CPU, "bf16")


def test_auto_suits_the_device_and_the_dtype(installed: dict[tuple[str, AttentionKind], Row]) -> None:
    assert resolve("auto", CPU, "bf16") == "torch"
    assert [resolve("auto", place, "fp32") for place in (HOPPER, BLACKWELL, ADA)] == ["torch"] * 3
    assert [resolve("auto", place, "bf16") for place in (HOPPER, BLACKWELL, ADA)] == ["fa4,fi", "trtllm", "fi"]
    assert resolve("auto", HOPPER, "bf16", LIGHTNING) == "torch"


def test_auto_in_the_matrix_is_the_rows_it_stands_for_each_on_its_own_dtypes(installed: dict[tuple[str, AttentionKind], Row]) -> None:
    found = {(row.name, row.kind, row.dtypes) for row in chosen_rows("auto", HOPPER)}
    assert found == {("fa4,fi", SOFTMAX, ("bf16", "fp16")), ("torch", SOFTMAX, ("fp32",)), ("torch", LIGHTNING, None)}
    assert [(row.name, row.kind) for row in chosen_rows("auto", CPU)] == [("torch", SOFTMAX), ("torch", LIGHTNING)]


def test_a_row_with_dtypes_has_the_cells_of_those(installed: dict[tuple[str, AttentionKind], Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    cells = Selection(backends=("auto", "torch"), modes=("cg_decode",), device="cuda").cells()
    by_row = {name: {cell.case.dtype for cell in cells if cell.row.name == name} for name in ("torch", "fa4,fi")}
    assert by_row == {"torch": {"bf16", "fp16", "fp32"}, "fa4,fi": {"bf16", "fp16"}}
    assert len({cell.id for cell in cells}) == len(cells)


def test_unknown_names_fail_with_the_known_ones() -> None:
    for name in ("nosuch", "torch,nosuch", "nosuch,torch"):
        with pytest.raises(UsageError, match=r"unknown backend 'nosuch'; known: conch, .*torch.*, fa, auto"):
            chosen_rows(name, CPU)
    with pytest.raises(UsageError, match="'fa' stands for a row that depends on the device; name one of fa3, fa4, fa2"):
        find_rows("fa")
    with pytest.raises(ValueError, match="'auto': this name stands for other rows"):
        registry.register(Row("auto", SOFTMAX, TorchSoftmax, source=__file__))


def test_create_attention_backend_builds_rows_and_pairs() -> None:
    world = World(parse_case("extend-p16-prefix0-new4-h2x1x32-fp32-shuffled"), RunnerMode.EAGER, PEAKED, Conventions(), torch.device("cpu"))
    assert isinstance(create_attention_backend("auto", world.context), TorchSoftmax)
    pair = create_attention_backend("torch,flex", world.context)
    assert isinstance(pair, HybridBackend) and isinstance(pair.prefill, TorchSoftmax)
    assert isinstance(create_attention_backend("torch,torch", world.context), TorchSoftmax)
    with pytest.raises(UsageError, match="a hybrid backend is a pair"):
        create_attention_backend("torch,flex,torch", world.context)


class Exclusive(TorchSoftmax):
    """Windows count the keys before the query's own; outputs are flat."""

    def __init__(self, context: Context) -> None:
        super().__init__(replace(context, windows=tuple(None if w is None else w + 1 for w in context.windows)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q, k, v, layer_id, batch).flatten(1)


INCLUSIVE = find_row("torch", SOFTMAX)
EXCLUSIVE = Row(
    "exclusive", SOFTMAX, Exclusive, conventions=Conventions(window="exclusive", output="flat", tail_may_hold_nan=False), source=__file__
)


@pytest.mark.parametrize(
    ("first", "second"), [(INCLUSIVE, EXCLUSIVE), (EXCLUSIVE, INCLUSIVE)], ids=["inclusive,exclusive", "exclusive,inclusive"]
)
@pytest.mark.parametrize(
    ("mode", "case"),
    [
        (RunnerMode.EAGER, "extend-p16-prefix9.3-new2.5-h2x1x32-fp32-shuffled-w4"),
        (RunnerMode.EAGER, "decode-p16-prefix9.3-new1.1-h2x1x32-fp32-shuffled-w4"),
        (RunnerMode.CG_DECODE, "decode-p16-prefix9.3-new1.1-h2x1x32-fp32-shuffled-w4-wfirst"),
        (RunnerMode.VERIFY_CG, "target_verify-p16-prefix9.3-new2.2-h2x1x32-fp32-shuffled-w4"),
        (RunnerMode.HANDOFF, "extend-p16-prefix0.0-new9.3-h2x1x32-fp32-shuffled-w4"),
    ],
)
def test_each_side_of_a_pair_keeps_its_conventions(first: Row, second: Row, mode: RunnerMode, case: str) -> None:
    result = run_cell(_pair("a,b", first, second), mode, parse_case(case), torch.device("cpu"), controls=())
    assert (result.status, result.reason) == ("pass", "")


def test_a_pair_tolerates_what_both_sides_do_and_rounds_on_each_side_apart() -> None:
    def step(name: str) -> Conventions:
        return Conventions(rounding=(RoundingStep(name, "kernel.py"),))

    assert not _pair("a,b", INCLUSIVE, EXCLUSIVE).conventions.tail_may_hold_nan
    rows = [Row(name, SOFTMAX, TorchSoftmax, conventions=step(name), source=__file__) for name in ("first", "second")]
    conventions = _pair("a,b", *rows).conventions
    prompt = parse_case("extend-p16-prefix0-new4-h2x1x32-fp32-shuffled")
    decode: Case = prompt.but(forward=ForwardMode.DECODE, prefix_lens=(4,), new_lens=(1,))
    assert [conventions.rounding_of(case, "cpu") for case in (prompt, decode)] == [{"first"}, {"second"}]


def test_pools_of_different_layout_make_no_pair() -> None:
    other = Row("other", SOFTMAX, TorchSoftmax, conventions=Conventions(kv_layout="HND"), source=__file__)
    with pytest.raises(UsageError, match="pools cannot be shared"):
        _pair("torch,other", INCLUSIVE, other)
