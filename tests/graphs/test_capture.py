"""Warm-up and capture run on dummies: what they leave behind must be finite, and written to scratch only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.layouts import decode, extend
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.context import Context
from attnmatrix.harness.guards import Guards
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import Row
from attnmatrix.harness.trial import describe, run_trial
from attnmatrix.harness.world import World

SOFTMAX = AttentionKind.SOFTMAX
CPU = torch.device("cpu")
DECODE = decode(16, (40, 20, 33), SOFTMAX)
EXTEND = extend(16, (0, 20, 33), (18, 7, 1), SOFTMAX)


class WrongOnDummies(TorchSoftmax):
    """Goes wrong in warm-up and capture, known by tokens that all go to the last page, the scratch page."""

    def __init__(self, context: Context, nan: bool) -> None:
        super().__init__(context)
        self.nan = nan

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        out, kv = super().forward(q, k, v, layer_id, batch), self.context.kv
        assert kv is not None
        if int(batch.out_loc.min()) < (kv.num_pages - 1) * kv.page_size:
            return out
        if not self.nan:
            kv.store(layer_id, torch.tensor([0]), k[:1], v[:1])
        return out * float("nan") if self.nan else out


@pytest.mark.parametrize(
    ("mode", "nan", "stages"),
    [
        (RunnerMode.PCG_EXTEND, True, {"capture"}),
        (RunnerMode.BCG_EXTEND, True, {"warm-up", "capture"}),
        (RunnerMode.PCG_EXTEND, False, {"warm-up or capture"}),
        (RunnerMode.BCG_EXTEND, False, {"warm-up or capture"}),
    ],
)
def test_what_dummies_leave_behind_is_judged(mode: RunnerMode, nan: bool, stages: set[str]) -> None:
    row = Row("dummies", SOFTMAX, lambda context: WrongOnDummies(context, nan), source=__file__)
    lines = describe(run_trial(row, mode, EXTEND, CPU, PEAKED))
    finding = "the model's output is not finite" if nan else "slots outside out_loc changed"
    assert {line.split(":")[0] for line in lines if finding in line and not line.startswith("layer")} == stages, lines


def test_a_capture_that_differs_from_its_warm_up_is_judged() -> None:
    class SecondCallNaN(TorchSoftmax):
        def prepare_for_capture(self, batch: Batch) -> None:
            super().prepare_for_capture(batch)
            self.calls = 0

        def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
            self.calls += 1
            return super().forward(q, k, v, layer_id, batch) * (1.0 if self.calls <= 2 else float("nan"))

    row = Row("second", SOFTMAX, SecondCallNaN, source=__file__)
    lines = describe(run_trial(row, RunnerMode.CG_DECODE, DECODE, CPU, PEAKED))
    assert "capture: the model's output is not finite (peaked inputs)" in lines, lines
    assert not any(line.startswith("warm-up:") for line in lines)


def test_what_warm_up_writes_outside_scratch_is_found_even_in_a_slot_that_a_step_writes_later() -> None:
    world = World(DECODE, RunnerMode.CG_DECODE, PEAKED, Conventions(), CPU)
    guards, kv, slot = Guards(world), world.context.kv, int(world.batch(3).out_loc[0])
    assert kv is not None
    kv.store(0, world.scratch_slots[:1], torch.ones(1, 2, 128), torch.ones(1, 2, 128))
    assert guards.beyond_scratch() == []
    kv.store(0, torch.tensor([slot]), torch.ones(1, 2, 128), torch.ones(1, 2, 128))
    assert len(guards.beyond_scratch()) == 2
    assert guards.untouched() == []
