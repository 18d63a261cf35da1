"""Negative controls tamper with what a row is given, but never so that a kernel reads outside its tables."""

from __future__ import annotations

import pytest
import torch

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.suites import suite
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.controls import CONTROLS
from attnmatrix.harness.probes import PLAIN
from attnmatrix.harness.world import World
from attnmatrix.references.visibility import visible_keys

WINDOWED = "extend-p1-prefix0.15-new1.1-h4x1x64-fp32-shuffled-w3"
CPU = torch.device("cpu")


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.id)
@pytest.mark.parametrize("kind", AttentionKind)
def test_lengths_stay_what_a_batch_can_have(control, kind) -> None:  # type: ignore[no-untyped-def]
    """Host and device lengths agree, no prefix is negative, no request is longer than its table row."""
    for mode in (RunnerMode.EAGER, RunnerMode.VERIFY):
        for case in [case for case in suite(kind, mode) if control.applies(case) and max(case.kv_lens) < 300][::4]:
            world = World(case, mode, PLAIN, Conventions(), CPU)
            given = control.batch(world.batch(0), control.context(world, world.context))
            lens = given.prefix_lens if given.forward_mode.seq_lens_is_prefix else given.kv_lens
            assert given.seq_lens.tolist() == list(lens), case.id
            assert min(given.prefix_lens, default=0) >= 0
            assert max(given.kv_lens, default=0) <= world.context.max_seq_len
            assert given.cu_seqlens_q.diff().tolist() == list(given.new_lens)
            assert sum(given.new_lens) == case.num_tokens


def test_another_page_holds_a_cached_key_that_is_seen() -> None:
    """In a window as well: kernels that are handed the new keys read cached ones alone through the table."""
    control = next(control for control in CONTROLS if control.id == "wrong-page")
    cases = [case for case in suite(AttentionKind.SOFTMAX, RunnerMode.EAGER) if case.window and control.applies(case)]
    checked = 0
    for case in [parse_case(WINDOWED), *(case for case in cases if max(case.kv_lens) < 300)]:
        world = World(case, RunnerMode.EAGER, PLAIN, Conventions(), CPU)
        moved = control.context(world, world.context).req_to_token != world.req_to_token
        for step in world.steps:
            for local, (request, prefix, new) in enumerate(zip(step.requests, step.case.prefix_lens, step.case.new_lens, strict=True)):
                if prefix and new:
                    seen = visible_keys(step.case, local, 0)[0, :prefix]
                    assert bool((moved[world.req_rows[request], :prefix] & seen).any()), (case.id, local)
                    checked += 1
    assert checked > 10
