"""The ``torch-vk`` row: guards, snapshots, drafts, commits, faults and controls over a pool of ``[V, K]`` states."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backends.torch_lightning import TorchLightning
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.context import Context
from attnmatrix.harness.controls import CONTROLS
from attnmatrix.harness.registry import find_row

CPU = torch.device("cpu")
ROW = find_row("torch-vk", AttentionKind.LIGHTNING)
CELLS = (
    (RunnerMode.EAGER, "lightning-extend-p16-prefix0.12.5-new5.4.1-h2x2x32-bf16-shuffled"),
    (RunnerMode.EAGER, "lightning-extend-p16-prefix0.9-new40.7-h2x2x32-bf16-shuffled-track32.4"),
    (RunnerMode.EAGER, "lightning-decode-p16-prefix5.9-new1.1-h2x2x32-bf16-shuffled-statesbf16"),
    (RunnerMode.CG_DECODE, "lightning-decode-p16-prefix5.9-new1.1-h2x2x32-bf16-shuffled"),
    (RunnerMode.PCG_EXTEND, "lightning-extend-p16-prefix0.9-new5.4-h2x2x32-bf16-shuffled"),
    (RunnerMode.VERIFY, "lightning-target_verify-p16-prefix5.9-new3.2-h2x2x32-bf16-shuffled"),
    (RunnerMode.VERIFY, "lightning-target_verify-p16-prefix5.9-new3.3-h2x2x32-bf16-shuffled-thena2.0_v3_a1.3_d"),
    (RunnerMode.VERIFY_CG, "lightning-target_verify-p16-prefix5.9-new3.3-h2x2x32-bf16-shuffled"),
)
IDS = [f"{mode.value}-{case}" for mode, case in CELLS]


def test_the_pool_holds_values_first() -> None:
    seen: list[tuple[int, ...]] = []

    class Looks(TorchLightning):
        def prepare_metadata(self, batch: Batch) -> None:
            assert self.context.states is not None
            seen.append(self.context.states.as_kv(self.context.states.state(0)).stride())
            super().prepare_metadata(batch)

    run_cell(replace(ROW, create=Looks), RunnerMode.EAGER, parse_case(CELLS[0][1]), CPU, controls=())
    assert seen
    assert {stride[-2:] for stride in seen} == {(1, 32)}


@pytest.mark.parametrize(("mode", "case"), CELLS, ids=IDS)
def test_the_row_is_right_and_every_control_is_rejected(mode: RunnerMode, case: str) -> None:
    parsed = parse_case(case)
    controls = tuple(control for control in CONTROLS if control.applies(parsed))
    assert controls
    result = run_cell(ROW, mode, parsed, CPU, controls=controls)
    assert result.status == "pass", (result.reason, *result.details)


class TransposeForgotten(TorchLightning):
    def __init__(self, context: Context) -> None:
        states = copy.copy(context.states)
        assert states is not None
        states.layout = "KV"
        super().__init__(replace(context, states=states))


@pytest.mark.parametrize(("mode", "case"), CELLS, ids=IDS)
def test_a_forgotten_transpose_is_red_and_told(mode: RunnerMode, case: str) -> None:
    result = run_cell(replace(ROW, create=TransposeForgotten), mode, parse_case(case), CPU, controls=())
    assert result.status == "fail"
    assert all(trial.error is None for trial in result.trials)
    assert "Y93" in result.diagnosis, result.diagnosis


class WritesItsNeighbour(TorchLightning):
    """Leaves one value in a state that no request owns, in the last row of the pool's own layout."""

    def prepare_metadata(self, batch: Batch) -> None:
        assert self.context.states is not None
        assert batch.state_indices is not None
        pool = self.context.states.state(1)
        free = next(slot for slot in range(pool.shape[0]) if slot not in batch.state_indices.tolist())
        pool[free, -1, -1, 0] = 7.0
        super().prepare_metadata(batch)


def test_a_write_to_anothers_state_is_seen() -> None:
    result = run_cell(replace(ROW, create=WritesItsNeighbour), RunnerMode.EAGER, parse_case(CELLS[0][1]), CPU, controls=(), diagnosed=False)
    assert result.status == "fail"
    assert any("states changed that the batch does not own" in line for line in result.details)
