"""Controls tamper with calls inside a graph capture, so they may copy nothing from the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.layouts import decode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.speculative import verify
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.controls import CONTROLS, Control
from attnmatrix.harness.graphs import capturing
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.runners.static_batch import StaticBatch
from attnmatrix.harness.tape import Tape
from attnmatrix.harness.world import World

CPU = torch.device("cpu")
CASES = {
    RunnerMode.CG_DECODE: decode(16, (20, 0, 33), AttentionKind.SOFTMAX),
    RunnerMode.VERIFY_CG: verify(16, (14, 15, 16), 4, AttentionKind.SOFTMAX),
}
each_mode = pytest.mark.parametrize("mode", CASES, ids=lambda mode: mode.value)


def of_kind(case: Case, kind: AttentionKind) -> Case:
    return case if kind is AttentionKind.SOFTMAX else case.but(kind=kind, heads=replace(case.heads, q=case.heads.kv))


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.id)
@pytest.mark.parametrize("kind", AttentionKind, ids=lambda kind: kind.value)
@each_mode
def test_a_control_can_be_captured_and_keeps_host_and_device_in_step(mode: RunnerMode, kind: AttentionKind, control: Control) -> None:
    world = World(of_kind(CASES[mode], kind), mode, PEAKED, Conventions(), CPU)
    static = StaticBatch(world, 8)
    context, tape, inputs = control.context(world, world.context), Tape(), static.tokens.inputs[0]
    with capturing(tape):
        given = control.batch(static.capture(), context)
        control.inputs(inputs.q, inputs.k, inputs.v)
    for index in (0, 1):
        on_host = control.batch(static.load(index, "stale"), context)
        tape.replay()
        prefix = on_host.forward_mode.seq_lens_is_prefix
        assert given.seq_lens.tolist() == list(on_host.prefix_lens if prefix else on_host.kv_lens)
        assert given.cu_seqlens_q.diff().tolist() == list(on_host.new_lens)


@each_mode
def test_controls_of_lengths_are_rejected_and_none_raises(mode: RunnerMode) -> None:
    chosen = [control for control in CONTROLS if control.kind == "length"]
    result = run_cell(find_row("torch", AttentionKind.SOFTMAX), mode, CASES[mode], CPU, controls=chosen)
    assert result.status == "pass", result.reason
    assert (result.controls["length"].rejected, result.controls["length"].raised) == (len(chosen), 0)
