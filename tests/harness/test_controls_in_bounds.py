"""Negative controls tamper with what a row is given, but never so that a kernel reads outside its tables."""

from __future__ import annotations

import pytest
import torch

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.suites import suite
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.controls import CONTROLS
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.world import World

CPU = torch.device("cpu")


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.id)
@pytest.mark.parametrize("kind", AttentionKind)
def test_lengths_stay_what_a_batch_can_have(control, kind) -> None:  # type: ignore[no-untyped-def]
    """Host and device lengths agree, no prefix is negative, no request is longer than its table row."""
    for mode in (RunnerMode.EAGER, RunnerMode.VERIFY):
        for case in [case for case in suite(kind, mode) if control.applies(case) and max(case.kv_lens) < 300][::4]:
            world = World(case, mode, PEAKED, Conventions(), CPU)
            given = control.batch(world.batch(0), control.context(world, world.context))
            lens = given.prefix_lens if given.forward_mode.seq_lens_is_prefix else given.kv_lens
            assert given.seq_lens.tolist() == list(lens), case.id
            assert min(given.prefix_lens, default=0) >= 0
            assert max(given.kv_lens, default=0) <= world.context.max_seq_len
            assert given.cu_seqlens_q.diff().tolist() == list(given.new_lens)
            assert sum(given.new_lens) == case.num_tokens
