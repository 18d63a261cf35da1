"""The LSE of rows that return it is judged in nats, in their declared base, sinks included."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backends.flex import Flex
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.controls import CONTROLS
from attnmatrix.harness.measure import absolute_error
from attnmatrix.harness.probes import PROBES
from attnmatrix.harness.registry import Row, find_row
from attnmatrix.harness.trial import Trial, run_trial

NEEDLE = next(probe for probe in PROBES if probe.name == "needle")
CPU = torch.device("cpu")
IDS = {
    RunnerMode.EAGER: (
        "mixed-p16-prefix0.20.5-new17.3.1-h4x2x64-fp32-shuffled-sinks",
        "decode-p16-prefix14.15.16-new1.1.1-h4x2x64-bf16-shuffled",
    ),
    RunnerMode.VERIFY: ("target_verify-p16-prefix14.31-new6.6-h4x2x64-fp32-shuffled-treer.0.0.1.1.2-eagle",),
}
CELLS = [(mode, case_id) for mode, ids in IDS.items() for case_id in ids]


def trial(row: Row, mode: RunnerMode, case_id: str) -> Trial:
    return run_trial(row, mode, parse_case(case_id), CPU, NEEDLE)


def quantities(found: Trial) -> set[str]:
    return {m.quantity for verdict in found.verdicts for m in verdict.measurements}


class Wrong(Flex):
    """Flex with a fault in its LSE alone."""

    def forward_with_lse(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> tuple[Tensor, Tensor]:
        out, lse = super().forward_with_lse(q, k, v, layer_id, batch)
        return out, self.spoil(lse)

    def spoil(self, lse: Tensor) -> Tensor:
        return lse / math.log(2)


class Unnormalised(Wrong):
    def spoil(self, lse: Tensor) -> Tensor:
        return lse - math.log(1.0001)


class NextHead(Wrong):
    def spoil(self, lse: Tensor) -> Tensor:
        return lse.roll(1, dims=1)


class HalfPrecision(Wrong):
    def spoil(self, lse: Tensor) -> Tensor:
        return lse.bfloat16().float()


@pytest.mark.parametrize(("mode", "case_id"), CELLS)
def test_a_right_lse_passes_and_is_measured(mode: RunnerMode, case_id: str) -> None:
    found = trial(find_row("flex", AttentionKind.SOFTMAX), mode, case_id)
    assert found.passed
    assert quantities(found) == {"out", "lse"}


@pytest.mark.parametrize("backend", [Wrong, Unnormalised, NextHead, HalfPrecision])
@pytest.mark.parametrize(("mode", "case_id"), CELLS)
def test_a_wrong_lse_beside_a_right_output_is_red(mode: RunnerMode, case_id: str, backend: type[Wrong]) -> None:
    found = trial(replace(find_row("flex", AttentionKind.SOFTMAX), create=backend), mode, case_id)
    assert found.error is None
    wrong = {m.quantity for verdict in found.verdicts for m in verdict.measurements if float(m.ratio.max()) > 1}
    assert wrong == {"lse"}


@pytest.mark.parametrize("control_id", ["wrong-page", "one-long", "wrong-scale", "no-sinks"])
def test_a_control_is_rejected_by_the_lse_too(control_id: str) -> None:
    control = next(control for control in CONTROLS if control.id == control_id)
    mode, case_id = CELLS[0]
    found = run_trial(find_row("flex", AttentionKind.SOFTMAX), mode, parse_case(case_id), CPU, NEEDLE, control)
    assert found.error is None
    assert "lse" in {m.quantity for verdict in found.verdicts for m in verdict.measurements if float(m.ratio.max()) > 1}


def test_the_declared_base_is_translated() -> None:
    row = find_row("flex", AttentionKind.SOFTMAX)
    two = replace(row, create=Wrong, conventions=replace(row.conventions, lse_base="2"))
    assert isinstance(two.conventions, Conventions)
    assert trial(two, *CELLS[0]).passed


def test_an_lse_of_another_shape_is_a_broken_contract() -> None:
    class Transposed(Wrong):
        def spoil(self, lse: Tensor) -> Tensor:
            return lse.T

    found = trial(replace(find_row("flex", AttentionKind.SOFTMAX), create=Transposed), *CELLS[0])
    assert "forward_with_lse returned" in str(found.error)


def test_rows_without_an_lse_are_not_asked() -> None:
    assert quantities(trial(find_row("torch", AttentionKind.SOFTMAX), *CELLS[0])) == {"out"}


def test_absolute_errors_take_equal_infinities_and_no_nan() -> None:
    right = torch.tensor([[-math.inf], [1.0], [1.0], [-math.inf]])
    found = absolute_error(torch.tensor([[-math.inf], [1.5], [math.nan], [0.0]]), right)
    assert found.tolist() == [0.0, 0.5, math.inf, math.inf]
