"""The model's own pieces in a graph are judged: one that is skipped or stale shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.layouts import decode, extend
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.cases.speculative import verify
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.pieces import stale_pieces
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.runners import RUNNERS
from attnmatrix.harness.runners.recorder import Recorder, StepRun
from attnmatrix.harness.runners.split_graph import SplitGraph
from attnmatrix.harness.trial import describe, run_trial
from attnmatrix.harness.world import World

SOFTMAX = AttentionKind.SOFTMAX
CPU = torch.device("cpu")
CASES = {
    RunnerMode.CG_DECODE: decode(16, (40, 20, 33), SOFTMAX),
    RunnerMode.VERIFY_CG: verify(16, (14, 15, 16), 4, SOFTMAX),
    RunnerMode.PCG_EXTEND: extend(16, (0, 20, 33), (18, 7, 1), SOFTMAX),
    RunnerMode.BCG_EXTEND: extend(16, (0, 20, 33), (18, 7, 1), SOFTMAX),
}
each_mode = pytest.mark.parametrize("mode", CASES, ids=lambda mode: mode.value)
split_modes = pytest.mark.parametrize("mode", [RunnerMode.PCG_EXTEND, RunnerMode.BCG_EXTEND], ids=lambda mode: mode.value)


@split_modes
@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_a_piece_that_is_not_replayed_shows(mode: RunnerMode, skipped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(self: SplitGraph, attend: Recorder, live: int) -> None:
        for index, graph in enumerate(self.graphs):
            if index != skipped:
                graph.replay()
            if index < len(self.points):
                self.points[index].run(attend, live)

    monkeypatch.setattr(SplitGraph, "replay", replay)
    result = run_trial(find_row("torch", SOFTMAX), mode, CASES[mode], CPU, PEAKED)
    assert any("a captured piece is stale" in line for line in describe(result)), describe(result)
    if skipped == 2:
        assert any("the model's output is not finite" in line for line in describe(result)), "the last result was not overwritten"


@split_modes
def test_tokens_behind_the_real_ones_are_nan_or_stale(mode: RunnerMode, monkeypatch: pytest.MonkeyPatch) -> None:
    tails: list[bool] = []
    replay = SplitGraph.replay

    def watched(self: SplitGraph, attend: Recorder, live: int) -> None:
        tails.append(bool(self.tokens.hidden[live:].isnan().all()))
        replay(self, attend, live)

    monkeypatch.setattr(SplitGraph, "replay", watched)
    run_trial(find_row("torch", SOFTMAX), mode, CASES[mode], CPU, PEAKED)
    assert tails == [step.fill == "production" for step in schedule(CASES[mode], mode, PEAKED.recycled).steps]


def steps_of(mode: RunnerMode) -> Iterator[tuple[World, StepRun]]:
    world = World(CASES[mode], mode, PEAKED, Conventions(), CPU)
    for run in RUNNERS[mode](world, TorchSoftmax(world.context)):
        yield world, run


@each_mode
@pytest.mark.parametrize("tensor", ["q of layer 1", "k of layer 1", "v of layer 0", "the model's output"])
def test_a_stale_result_of_a_piece_is_named(mode: RunnerMode, tensor: str) -> None:
    for world, run in steps_of(mode):
        assert stale_pieces(world, run) == []
        name, _, layer = tensor.partition(" of layer ")
        stale = run.final if not layer else getattr(run.calls[int(layer)], name)
        stale[-1] = stale[0] if len(stale) > 1 else stale[0] + 1
        assert [line.split(" does not")[0] for line in stale_pieces(world, run)] == [tensor]
