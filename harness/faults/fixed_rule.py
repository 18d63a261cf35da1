"""What a common fixed-tolerance suite sees: the yardstick that the kill score is compared with.

Ten layouts, shuffled pages, one batch, zeros in unused slots, one captured size and one replay of it, outputs within ``atol = rtol``
of the reference. Nothing else is looked at: no pool, no table, no canary, no metadata, no second fill.
"""

from __future__ import annotations

import torch

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.layouts import seed_layouts
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import Schedule, Step
from attnmatrix.cases.suites import drives
from attnmatrix.harness.expected import expected_quantities
from attnmatrix.harness.probes import Poison, Probe
from attnmatrix.harness.registry import Row
from attnmatrix.harness.runners import RUNNERS
from attnmatrix.harness.world import World

TOLERANCE = 3e-2
TOLERANCE_GRAPH_OR_VERIFY = 1e-1
ZEROS = Probe("zeros", poison=Poison.ZEROS)
PADDING = 3  # tokens that a piecewise graph is larger than its batch


def fixed_cases(kind: AttentionKind, mode: RunnerMode) -> tuple[Case, ...]:
    """The ten seed layouts that a mode drives; for verify modes the same lengths with the new tokens as a draft chain."""
    verify = ForwardMode.TARGET_VERIFY in mode.forward_modes
    cases = [case.but(name=case.name, forward=ForwardMode.TARGET_VERIFY) if verify else case for case in seed_layouts(kind)]
    return tuple(case for case in cases if drives(mode, case))


def fixed_rule_rejects(row: Row, mode: RunnerMode, case: Case, device: torch.device) -> str:
    """Why the fixed rule rejects a row on one case, empty when it does not. Whatever the backend raises passes through."""
    size = case.num_tokens + PADDING if mode.pads_tokens else case.batch_size
    plan = Schedule((size,) if mode.uses_graph else (), (Step(case, size),))
    world = World(case, mode, ZEROS, row.conventions, device, plan)
    tolerance = TOLERANCE_GRAPH_OR_VERIFY if mode is not RunnerMode.EAGER else TOLERANCE
    for run in RUNNERS[mode](world, row.create(world.context)):
        for call in run.calls:
            right = expected_quantities(world, run.index, call)["out"].reference
            if not torch.allclose(call.out.double(), right.double(), rtol=tolerance, atol=tolerance):
                worst = float((call.out.double() - right.double()).abs().max())
                return f"layer {call.layer}: outputs differ by up to {worst:.3g}"
    return ""
