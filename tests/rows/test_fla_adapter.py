"""The adapter of the ``fla`` rows around strict stand-ins for their kernels: right in every mode they claim, red when the adapter is wrong."""

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
from attnmatrix.harness.capabilities import Capabilities
from attnmatrix.harness.cell import CellResult, run_cell
from attnmatrix.harness.context import Context
from attnmatrix.harness.installed import installed_file
from attnmatrix.harness.registry import Row, find_row

CPU = torch.device("cpu")
ROW, VALUES_FIRST, CHUNK = (find_row(name, AttentionKind.LIGHTNING) for name in ("fla", "fla-vk", "fla-chunk"))
CELLS = (
    (RunnerMode.EAGER, "lightning-extend-p16-prefix0.12.5-new5.4.1-h2x2x64-bf16-shuffled"),
    (RunnerMode.EAGER, "lightning-extend-p16-prefix0.12.0.7-new0.0.4.3-h2x2x64-fp32-shuffled-strided"),
    (RunnerMode.EAGER, "lightning-extend-p16-prefix0.9-new5.4-h2x2x64-bf16-shuffled-thenx3.1_d2_n2_d"),
    (RunnerMode.EAGER, "lightning-decode-p16-prefix5.9.3-new1.1.1-h3x3x64-bf16-shuffled-statesbf16"),
    (RunnerMode.CG_DECODE, "lightning-decode-p16-prefix5.9-new1.1-h2x2x64-bf16-shuffled"),
    (RunnerMode.PCG_EXTEND, "lightning-extend-p16-prefix0.9-new5.4-h2x2x64-bf16-shuffled"),
    (RunnerMode.BCG_EXTEND, "lightning-mixed-p16-prefix0.9-new5.1-h2x2x64-bf16-shuffled"),
)
CHUNK_CELLS = (
    (RunnerMode.EAGER, "lightning-extend-p16-prefix0.12.0.7-new0.0.4.3-h2x2x64-fp32-shuffled-strided"),
    (RunnerMode.EAGER, "lightning-mixed-p16-prefix0.9.30-new70.1.5-h2x2x64-fp32-shuffled"),
    (RunnerMode.EAGER, "lightning-extend-p16-prefix0.9-new5.4-h2x2x64-fp32-shuffled-thenx3.1_d2_n2_d"),
    (RunnerMode.EAGER, "lightning-decode-p16-prefix5.9.3-new1.1.1-h3x3x64-bf16-shuffled-statesbf16"),
    (RunnerMode.PCG_EXTEND, "lightning-extend-p16-prefix0.9-new5.4-h2x2x64-fp32-shuffled"),
    (RunnerMode.BCG_EXTEND, "lightning-mixed-p16-prefix0.9-new5.1-h2x2x64-fp32-shuffled"),
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
    kernels = support("fla_stand_in")
    monkeypatch.setattr(fla, "load_kernel", lambda form: getattr(kernels, f"{form}_simple_gla"))


def run(row: Row, mode: RunnerMode, case: str) -> CellResult:
    return run_cell(row, mode, parse_case(case), CPU, controls=(), diagnosed=False)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("row", "mode", "case"),
    [
        *((row, *cell) for row, cells in ((ROW, CELLS), (VALUES_FIRST, CELLS[3:6])) for cell in cells),
        *((CHUNK, *cell) for cell in CHUNK_CELLS),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_adapter_is_right(row: Row, mode: RunnerMode, case: str) -> None:
    result = run(row, mode, case)
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


class TransposeForgotten(fla.Fla):
    """Hands ``[V, K]`` states to a kernel that takes them for ``[K, V]``, and stores what it returns."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._v_first = False


@pytest.mark.usefixtures("stand_in")
def test_a_forgotten_transpose_is_red() -> None:
    for mode, case in (CELLS[0], CELLS[3], CELLS[4]):
        result = run(replace(VALUES_FIRST, create=TransposeForgotten), mode, case)
        assert result.status == "fail"
        assert all(trial.error is None for trial in result.trials)


@pytest.mark.usefixtures("stand_in")
def test_no_graph_holds_the_chunk_form() -> None:
    mode, case = CELLS[4]
    result = run(replace(CHUNK, capabilities=Capabilities()), mode, case)
    assert result.status == "fail"
    assert "tolist" in result.reason


ROUNDED = (
    "lightning-extend-p16-prefix0.9-new70.5-h2x2x64-bf16-shuffled",
    "lightning-mixed-p16-prefix0.9.30-new7.1.65-h2x2x64-fp16-shuffled-state1",
)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("case", ROUNDED)
def test_the_chunk_form_is_red_without_its_rounding_steps_and_green_with_them(case: str) -> None:
    bare = replace(CHUNK, conventions=replace(CHUNK.conventions, rounding=()))
    assert run(bare, RunnerMode.EAGER, case).status == "fail"
    result = run_cell(CHUNK, RunnerMode.EAGER, parse_case(case), CPU)
    assert result.status == "pass", (result.reason, *result.details)


INSTALLED = pytest.mark.skipif("fla-core" in ROW.missing, reason="fla-core not installed")


@INSTALLED
@pytest.mark.parametrize("form", [fla.RECURRENT, fla.CHUNK])
def test_the_stand_in_has_the_packages_arguments(form: str) -> None:
    source = installed_file("fla-core", f"ops/simple_gla/{form}.py").read_text()
    signature = source[source.index(f"def {form}_simple_gla(") :].split(") ->", 1)[0]
    theirs = [line.split(":")[0].strip(" ,*") for line in signature.splitlines()[1:] if ":" in line or "**" in line]
    assert theirs == list(inspect.signature(getattr(support("fla_stand_in"), f"{form}_simple_gla")).parameters)


@INSTALLED
@pytest.mark.parametrize("row", [ROW, VALUES_FIRST, CHUNK], ids=lambda row: row.name)
def test_what_the_rows_leave_out_is_not_in_the_package(row: Row) -> None:
    tracked = "lightning-extend-p16-prefix0-new40-h2x2x64-bf16-shuffled-track32"
    verify = "lightning-target_verify-p16-prefix9-new3-h2x2x64-bf16-shuffled"
    cells = [(RunnerMode.EAGER, tracked), (RunnerMode.VERIFY, verify), *([CELLS[4]] if row is CHUNK else [])]
    assert [run(row, *cell).status for cell in cells] == ["n/a"] * len(cells)
