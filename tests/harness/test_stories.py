"""Stories: their text, their batches, and that what one call cannot show turns red."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import story_steps
from attnmatrix.cases.story import parse_story
from attnmatrix.harness.backends.torch_lightning import TorchLightning
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.world import UNTOUCHED, World

CPU = torch.device("cpu")
ROW = find_row("torch", AttentionKind.LIGHTNING)
PARTS = "lightning-extend-p16-prefix0.9-new5.4-h2x2x64-bf16-shuffled-thenx3.1_d2_n4_x2"
DRAFTS = "lightning-target_verify-p16-prefix20.9.4-new3.3.3-h2x2x64-bf16-shuffled-thena0.2.3_v2_a1.0.2_d"
TRACKED = "lightning-extend-p16-prefix0.9-new7.5-h2x2x64-bf16-shuffled-track3.5-thenr4.1_d"


def status(row_create: type[TorchLightning], case: str, mode: RunnerMode) -> str:
    return run_cell(replace(ROW, create=row_create), mode, parse_case(case), CPU, controls=(), diagnosed=False).status


def test_the_batches_of_a_story_follow_each_other() -> None:
    steps = story_steps(parse_case(DRAFTS))
    assert [(s.case.forward.value, s.case.prefix_lens, s.case.new_lens, s.accepted) for s in steps] == [
        ("target_verify", (20, 9, 4), (3, 3, 3), (0, 2, 3)),
        ("target_verify", (20, 11, 7), (2, 2, 2), (1, 0, 2)),
        ("decode", (21, 11, 9), (1, 1, 1), None),
    ]
    assert [(s.follows, s.case.prefix_lens) for s in story_steps(parse_case(TRACKED))] == [
        ("", (0, 9)),
        ("resume", (3, 14)),
        ("same", (7, 15)),
    ]
    assert [turn.action for turn in parse_story("x64t3_d2")] == ["extend"] * 3 + ["decode"] * 2


@pytest.mark.parametrize(
    ("story", "problem"),
    [("a1_d", "nothing else is"), ("v2_d", "every verify"), ("v2_a3_d", "more draft tokens"), ("v2_a1", "ends with"), ("r3", "snapshot"), ("q4", "unknown turn"), ("x1.2.3", "3 counts")],
)  # fmt: skip
def test_a_story_that_cannot_be_told_is_refused(story: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_case(f"lightning-extend-p16-prefix0.9-new5.4-h2x2x64-bf16-shuffled-then{story}")


def test_a_story_is_no_part_of_other_cases_content() -> None:
    plain = parse_case("lightning-decode-p16-prefix5.9-new1.1-h2x2x128-bf16-shuffled")
    assert (plain.story, plain.track_lens, plain.state_dtype, plain.shard) == ("", (), None, (0, 1))
    assert plain.content_hash == "4f4d8eb5db3a15c0"


@pytest.mark.parametrize(("case", "mode"), [(PARTS, RunnerMode.EAGER), (TRACKED, RunnerMode.EAGER), (DRAFTS, RunnerMode.VERIFY)])
def test_a_right_row_passes_its_controls_too(case: str, mode: RunnerMode) -> None:
    result = run_cell(ROW, mode, parse_case(case), CPU)
    assert result.status == "pass", result.reason


class KeepsOldState(TorchLightning):
    """A slot's first request is all right, a later one without prefix starts from what the first left."""

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        seen = self.__dict__.setdefault("seen", set())
        assert batch.state_indices is not None
        meta = batch.attn_metadata
        meta.spans = tuple((slot, start, stop, prefix or slot in seen) for slot, start, stop, prefix in meta.spans)
        seen |= set(batch.state_indices.tolist())


class SplitRounds(TorchLightning):
    """The state is rounded where a prompt was cut: nothing that the batch itself shows at its first part."""

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        return super()._chunk(q, k, v, state.bfloat16().float(), slopes)


class CommitsLast(TorchLightning):
    def commit(self, accepted: Tensor, batch: Batch) -> None:
        super().commit(torch.tensor(batch.new_lens), batch)


class CommitsElsewhere(TorchLightning):
    """The right states are committed, and one more slot is written."""

    def commit(self, accepted: Tensor, batch: Batch) -> None:
        super().commit(accepted, batch)
        assert self.context.states is not None
        assert batch.state_indices is not None
        pool = self.context.states.state(0)
        free = next(slot for slot in range(len(pool)) if slot not in batch.state_indices.tolist())
        pool[free] = 0


class SnapshotsFinal(TorchLightning):
    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        meta = batch.attn_metadata
        ends = {slot: stop - start for slot, start, stop, _ in meta.spans}
        meta.tracks = {slot: (ends[slot], into) for slot, (_, into) in meta.tracks.items()}


@pytest.mark.parametrize(
    ("wrong", "case", "mode"),
    [
        (KeepsOldState, PARTS, RunnerMode.EAGER),
        (SplitRounds, PARTS, RunnerMode.EAGER),
        (CommitsLast, DRAFTS, RunnerMode.VERIFY),
        (CommitsElsewhere, DRAFTS, RunnerMode.VERIFY),
        (SnapshotsFinal, TRACKED, RunnerMode.EAGER),
    ],
)
def test_what_one_call_cannot_show_is_red(wrong: type[TorchLightning], case: str, mode: RunnerMode) -> None:
    assert status(wrong, case, mode) == "fail"


def test_snapshots_start_from_slots_that_hold_54321() -> None:
    world = World(parse_case(TRACKED), RunnerMode.EAGER, PEAKED, ROW.conventions, CPU)
    states = world.context.states
    assert states is not None
    first = [world.state_slots[request] for request in world.schedule.requests[0]]
    others = [slot for slot in range(states.num_slots) if slot not in first]
    assert set(world.track_slots.values()) < set(others)
    assert bool((states.state(0)[others] == UNTOUCHED).all())
    assert [world.state_slots[request] for request in world.schedule.requests[1]] == list(world.track_slots.values())
