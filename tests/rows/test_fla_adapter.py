"""The ``fla`` row's adapter around a strict stand-in for its kernel: right in every mode it claims, red when the adapter is wrong."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backends import fla
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.cell import CellResult, run_cell
from attnmatrix.harness.context import Context
from attnmatrix.harness.installed import installed_file
from attnmatrix.harness.registry import Row, find_row

CPU = torch.device("cpu")
ROW = find_row("fla", AttentionKind.LIGHTNING)
CELLS = (
    (RunnerMode.EAGER, "lightning-extend-p16-prefix0.12.5-new5.4.1-h2x2x64-bf16-shuffled"),
    (RunnerMode.EAGER, "lightning-extend-p16-prefix0.12.0.7-new0.0.4.3-h2x2x64-fp32-shuffled-strided"),
    (RunnerMode.EAGER, "lightning-extend-p16-prefix0.9-new5.4-h2x2x64-bf16-shuffled-thenx3.1_d2_n2_d"),
    (RunnerMode.EAGER, "lightning-decode-p16-prefix5.9.3-new1.1.1-h3x3x64-bf16-shuffled-statesbf16"),
    (RunnerMode.CG_DECODE, "lightning-decode-p16-prefix5.9-new1.1-h2x2x64-bf16-shuffled"),
    (RunnerMode.PCG_EXTEND, "lightning-extend-p16-prefix0.9-new5.4-h2x2x64-bf16-shuffled"),
    (RunnerMode.BCG_EXTEND, "lightning-mixed-p16-prefix0.9-new5.1-h2x2x64-bf16-shuffled"),
)


def support(name: str) -> ModuleType:
    path = Path(__file__).parent.parent / "support" / f"{name}.py"
    spec = spec_from_file_location(f"tests_support_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = support("fla_stand_in").fused_recurrent_simple_gla
    monkeypatch.setattr(fla, "load_kernel", lambda: kernel)


def run(row: Row, mode: RunnerMode, case: str) -> CellResult:
    return run_cell(row, mode, parse_case(case), CPU, controls=(), diagnosed=False)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("mode", "case"), CELLS, ids=[f"{mode.value}-{case}" for mode, case in CELLS])
def test_the_adapter_is_right(mode: RunnerMode, case: str) -> None:
    result = run(ROW, mode, case)
    assert result.status == "pass", (result.reason, *result.details)


class NothingRefreshed(fla.Fla):
    def prepare_for_replay(self, batch: Batch) -> None:
        pass


class PrefixForgotten(fla.Fla):
    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        batch.attn_metadata.has_prefix = torch.zeros_like(batch.attn_metadata.has_prefix)


class StaleStart(fla.Fla):
    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        batch.attn_metadata.has_prefix = torch.ones_like(batch.attn_metadata.has_prefix)


class DecayNegated(fla.Fla):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._log_decay = [-rate for rate in self._log_decay]


class PaddingToSlotZero(fla.Fla):
    @staticmethod
    def _put_back(pool: torch.Tensor, slots: torch.Tensor, states: torch.Tensor) -> None:
        pool[slots.clamp(min=0).long()] = states.to(pool.dtype)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("wrong", "cell"),
    [(NothingRefreshed, 4), (PaddingToSlotZero, 4), (PrefixForgotten, 0), (StaleStart, 0), (DecayNegated, 0)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_mistaken_adapter_is_red(wrong: type[fla.Fla], cell: int) -> None:
    result = run(replace(ROW, create=wrong), *CELLS[cell])
    assert result.status == "fail"
    assert all(trial.error is None for trial in result.trials)


@pytest.mark.skipif("fla-core" in ROW.missing, reason="fla-core not installed")
def test_the_stand_in_has_the_packages_arguments() -> None:
    source = installed_file("fla-core", "ops/simple_gla/fused_recurrent.py").read_text()
    signature = source[source.index("def fused_recurrent_simple_gla(") :].split(") ->", 1)[0]
    theirs = [line.split(":")[0].strip() for line in signature.splitlines()[1:] if ":" in line]
    assert theirs == list(inspect.signature(support("fla_stand_in").fused_recurrent_simple_gla).parameters)
