"""The graph runners: what is captured, what replays are given, and that the model's own pieces are judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case, Scratch
from attnmatrix.cases.layouts import decode, extend
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.cases.speculative import verify
from attnmatrix.cases.suites import drives, suite
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.context import Context
from attnmatrix.harness.graphs import GraphMaker
from attnmatrix.harness.model import TwoLayerModel
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import Row, find_row
from attnmatrix.harness.runners.breakable import break_at_attention
from attnmatrix.harness.runners.piecewise import attention, split_at_attention
from attnmatrix.harness.runners.recorder import Recorder
from attnmatrix.harness.runners.split_graph import dummy_batch
from attnmatrix.harness.runners.static_batch import StaticBatch
from attnmatrix.harness.runners.static_tokens import StaticTokens
from attnmatrix.harness.trial import Trial, describe, run_trial
from attnmatrix.harness.world import World

SOFTMAX, LIGHTNING = AttentionKind.SOFTMAX, AttentionKind.LIGHTNING
CPU = torch.device("cpu")
GRAPH_MODES = (RunnerMode.CG_DECODE, RunnerMode.VERIFY_CG, RunnerMode.PCG_EXTEND, RunnerMode.BCG_EXTEND)
CASES = {
    RunnerMode.CG_DECODE: decode(16, (40, 20, 33), SOFTMAX),
    RunnerMode.VERIFY_CG: verify(16, (14, 15, 16), 4, SOFTMAX),
    RunnerMode.PCG_EXTEND: extend(16, (0, 20, 33), (18, 7, 1), SOFTMAX),
    RunnerMode.BCG_EXTEND: extend(16, (0, 20, 33), (18, 7, 1), SOFTMAX),
}
each_mode = pytest.mark.parametrize("mode", GRAPH_MODES, ids=lambda mode: mode.value)
split_modes = pytest.mark.parametrize("mode", [RunnerMode.PCG_EXTEND, RunnerMode.BCG_EXTEND], ids=lambda mode: mode.value)


def linear(case: Case) -> Case:
    heads = replace(case.heads, q=case.heads.kv)
    return case.but(kind=LIGHTNING, heads=heads)


def trial(mode: RunnerMode, case: Case, row: Row | None = None) -> Trial:
    return run_trial(row or find_row("torch", case.kind), mode, case, CPU, PEAKED)


def world_of(mode: RunnerMode, case: Case | None = None) -> World:
    return World(case or CASES[mode], mode, PEAKED, Conventions(), CPU)


@each_mode
@pytest.mark.parametrize("kind", AttentionKind, ids=lambda kind: kind.value)
def test_the_torch_rows_pass_on_the_tape(mode: RunnerMode, kind: AttentionKind) -> None:
    case = CASES[mode] if kind is SOFTMAX else linear(CASES[mode])
    result = trial(mode, case)
    assert result.passed, describe(result)
    assert result.graph == "tape"
    assert result.replays == len(schedule(case, mode, PEAKED.recycled).steps) >= 7


@each_mode
def test_a_pool_without_a_scratch_page_cannot_be_padded(mode: RunnerMode) -> None:
    result = trial(mode, CASES[mode].but(scratch=Scratch.NONE))
    assert isinstance(result.error, ValueError)
    assert "needs a pool with a scratch page" in str(result.error)


def test_a_verify_graph_needs_the_same_number_of_drafts_everywhere() -> None:
    ragged = CASES[RunnerMode.VERIFY_CG].but(new_lens=(2, 5, 3))
    result = trial(RunnerMode.VERIFY_CG, ragged)
    assert isinstance(result.error, ValueError)
    assert "same number of tokens in every request" in str(result.error)
    assert not drives(RunnerMode.VERIFY_CG, ragged)


@each_mode
@pytest.mark.parametrize("kind", AttentionKind, ids=lambda kind: kind.value)
def test_suites_hold_no_case_that_a_graph_cannot_take(mode: RunnerMode, kind: AttentionKind) -> None:
    for case in suite(kind, mode):
        assert case.scratch is not Scratch.NONE
        assert case.num_tokens > 0
        assert mode is not RunnerMode.VERIFY_CG or len(set(case.new_lens)) == 1


class Watching(TorchSoftmax):
    """Records every batch that it is given for a replay."""

    def __init__(self, context: Context, seen: list[Batch]) -> None:
        super().__init__(context)
        self.seen = seen

    def prepare_for_replay(self, batch: Batch) -> None:
        super().prepare_for_replay(batch)
        fields = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, Tensor)}
        self.seen.append(replace(batch, **fields))


@pytest.mark.parametrize("mode", [RunnerMode.CG_DECODE, RunnerMode.VERIFY_CG], ids=lambda mode: mode.value)
def test_padded_rows_write_to_scratch_and_host_and_device_agree(mode: RunnerMode) -> None:
    seen: list[Batch] = []
    result = trial(mode, CASES[mode], Row("watching", SOFTMAX, lambda context: Watching(context, seen), source=__file__))
    assert result.passed, describe(result)
    world = world_of(mode)
    scratch, steps = set(world.scratch_slots.tolist()), world.schedule.steps
    assert len(seen) == len(steps)
    stale = 0
    for batch, step in zip(seen, steps, strict=True):
        live = batch.size * world.context.tokens_per_request
        assert (batch.size, batch.padded_reqs) == (step.case.batch_size, step.padded)
        assert len(batch.seq_lens) == len(batch.prefix_lens) == len(batch.new_lens) == len(batch.kv_lens) == batch.padded_reqs
        lens = batch.prefix_lens if step.case.forward.seq_lens_is_prefix else batch.kv_lens
        assert batch.seq_lens.tolist() == list(lens)
        assert set(batch.out_loc[live:].tolist()) <= scratch
        assert not set(batch.out_loc[:live].tolist()) & scratch
        padded = slice(batch.size, None)
        if step.fill == "production":
            assert set(batch.req_pool_indices[padded].tolist()) <= {0}
            assert set(batch.prefix_lens[padded]) <= {0}
        else:
            stale += sum(1 for prefix in batch.prefix_lens[padded] if prefix)
    assert stale, "no padded row ever carried a stale length"


def test_padded_state_slots_are_minus_one_whatever_the_fill() -> None:
    static = StaticBatch(world_of(RunnerMode.CG_DECODE, linear(CASES[RunnerMode.CG_DECODE])), 8)
    assert static.state_indices is not None
    assert set(static.state_indices.tolist()) == {-1}
    for index, fill in ((1, "production"), (0, "stale")):
        batch = static.load(index, fill)
        assert batch.state_indices is not None
        assert set(batch.state_indices[batch.size :].tolist()) == {-1}
        assert min(batch.state_indices[: batch.size].tolist()) >= 0


def test_the_model_is_split_into_pieces_without_attention() -> None:
    chain = split_at_attention(TwoLayerModel(world_of(RunnerMode.PCG_EXTEND)))
    pieces = [getattr(chain, str(node.target)) for node in chain.graph.nodes if node.op == "call_module"]
    calls = [[node.target is attention for node in piece.graph.nodes if node.op.startswith("call")] for piece in pieces]
    assert [any(kinds) for kinds in calls] == [False, True, False, True, False]
    assert all(len(kinds) == 1 for kinds in calls if any(kinds))
    assert all(len(kinds) > 3 for kinds in calls if not any(kinds)), "a piece with nothing to do is eager in disguise"


def test_a_breakable_graph_has_a_segment_on_each_side_of_every_attention_call() -> None:
    world = world_of(RunnerMode.BCG_EXTEND)
    backend, batch = TorchSoftmax(world.context), dummy_batch(world, 40)
    backend.prepare_metadata(batch)
    tokens = StaticTokens(world, 40)
    split = break_at_attention(TwoLayerModel(world), tokens, Recorder(backend, batch, world), GraphMaker(CPU))
    assert (len(split.graphs), [point.layer for point in split.points]) == (3, [0, 1])
    assert all(len(graph) > 3 for graph in split.graphs)  # type: ignore[arg-type]


class Flat(TorchSoftmax):
    """Returns ``[T, heads * dim]``, as a row may declare."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q, k, v, layer_id, batch).flatten(1)


@each_mode
def test_a_flat_output_is_adapted(mode: RunnerMode) -> None:
    row = Row("flat", SOFTMAX, Flat, conventions=Conventions(output="flat"), source=__file__)
    result = trial(mode, CASES[mode], row)
    assert result.passed, describe(result)


@split_modes
def test_attention_of_split_graphs_gets_the_real_tokens_alone(mode: RunnerMode) -> None:
    shapes: list[tuple[int, int]] = []

    class Counting(TorchSoftmax):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
            shapes.append((len(q), batch.num_tokens))
            return super().forward(q, k, v, layer_id, batch)

    result = trial(mode, CASES[mode], Row("counting", SOFTMAX, Counting, source=__file__))
    assert result.passed, describe(result)
    steps = schedule(CASES[mode], mode, PEAKED.recycled).steps
    assert shapes[-2 * len(steps) :] == [(step.case.num_tokens,) * 2 for step in steps for _ in range(2)]
    assert all(step.padded > step.case.num_tokens for step in steps)


def test_outputs_are_filled_with_nan_before_each_replay() -> None:
    class Silent(TorchSoftmax):
        """Writes its output buffer at capture only: the copy sits in Python."""

        def __init__(self, context: Context) -> None:
            super().__init__(context)
            self._kept: dict[Any, Tensor] = {}

        def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
            out = super().forward(q, k, v, layer_id, batch)
            return self._kept.setdefault((layer_id, len(q)), out.clone())

    result = trial(RunnerMode.CG_DECODE, CASES[RunnerMode.CG_DECODE], Row("silent", SOFTMAX, Silent, source=__file__))
    assert any("error inf" in line for line in describe(result)), describe(result)


def test_a_backend_that_captures_no_graphs_says_so() -> None:
    class Eager(AttentionBackend):
        def prepare_metadata(self, batch: Batch) -> None: ...

        def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
            return q

    result = trial(RunnerMode.CG_DECODE, CASES[RunnerMode.CG_DECODE], Row("eager", SOFTMAX, Eager, source=__file__))
    assert isinstance(result.error, NotImplementedError)
    assert "Eager captures no graphs" in str(result.error)
