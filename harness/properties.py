"""Properties of a row beyond right values: what NaN it tolerates, and whether its bits depend on anything but a request's own data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case, Placement
from attnmatrix.cases.layouts import seed_layouts, window_edges
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.pools import bits
from attnmatrix.harness.probes import PLAIN, Poison, Probe
from attnmatrix.harness.registry import Row
from attnmatrix.harness.runners.recorder import AttentionCall, Recorder
from attnmatrix.harness.trial import run_trial
from attnmatrix.harness.world import World, freed_tokens

NAN_TIERS = (Poison.NAN_UNREFERENCED, Poison.NAN_TAIL, Poison.NAN_PADDING, Poison.NAN_WINDOW)
INVARIANCES = ("deterministic", "batch_invariant")
PROPERTIES = (*(tier.value for tier in NAN_TIERS), *INVARIANCES)


@dataclass(frozen=True)
class PropertyResult:
    """Whether one property held on one case; ``promised`` says that the row declares it."""

    name: str
    holds: bool
    promised: bool

    @property
    def broken_promise(self) -> bool:
        return self.promised and not self.holds


FEW = ("ragged_page_boundary", "decode_page_boundary")


@cache
def _sample(kind: AttentionKind) -> dict[str, str]:
    """Ids (in bf16) of the cases examined, with their names."""
    cases = [case for case in seed_layouts(kind) if case.placement is Placement.SHUFFLED]
    if kind is AttentionKind.SOFTMAX:
        cases += window_edges(16)
    return {case.id: case.name for case in cases}


def examines(mode: RunnerMode, case: Case, few: bool = False) -> bool:
    """Whether a case's properties are examined: the seed layouts (``few``: two of them) and those at a window's edges, run eagerly in
    whatever dtype."""
    name = _sample(case.kind).get(case.but(dtype="bf16").id)
    return mode is RunnerMode.EAGER and name is not None and (not few or name in FEW)


def examine(row: Row, case: Case, device: torch.device) -> tuple[PropertyResult, ...]:
    """All properties on one case that passes. A tier that the case cannot show (no dead tail, no spare page) is left out."""
    found = [_nan_tier(row, case, device, tier) for tier in NAN_TIERS if _shows(case, tier)]
    calls = _first_step(row, case, device)
    again = _first_step(row, case, device)
    same = all(_equal(a.out, b.out) for a, b in zip(calls, again, strict=True))
    found.append(PropertyResult("deterministic", same, row.capabilities.deterministic))
    if case.batch_size > 1:
        alone = all(_alone(row, case, device, request, calls) for request in range(case.batch_size) if case.new_lens[request])
        found.append(PropertyResult("batch_invariant", alone, row.capabilities.batch_invariant))
    return tuple(found)


def _shows(case: Case, tier: Poison) -> bool:
    if case.kind.value != "softmax":
        return tier is Poison.NAN_UNREFERENCED
    if tier is Poison.NAN_TAIL:
        return any(length % case.page_size for length in case.kv_lens)
    if tier is Poison.NAN_WINDOW:
        return any(freed_tokens(case, prefix, 0) for prefix in case.prefix_lens)
    return tier is Poison.NAN_UNREFERENCED or len(set(case.kv_lens)) > 1


def _nan_tier(row: Row, case: Case, device: torch.device, tier: Poison) -> PropertyResult:
    allowed = {
        Poison.NAN_UNREFERENCED: row.conventions.unreferenced_may_hold_nan,
        Poison.NAN_TAIL: row.conventions.tail_may_hold_nan,
        Poison.NAN_PADDING: row.conventions.padding_may_hold_nan,
        Poison.NAN_WINDOW: row.conventions.window_may_hold_nan,
    }[tier]
    trial = run_trial(row, RunnerMode.EAGER, case, device, Probe(tier.value, poison=tier))
    return PropertyResult(tier.value, trial.passed, allowed)


def _first_step(row: Row, case: Case, device: torch.device) -> list[AttentionCall]:
    """The attention calls of the case's own batch in a world of its own, each layer on its planned inputs."""
    world = World(case, RunnerMode.EAGER, PLAIN, row.conventions, device)
    return _drive(row, world)


def _drive(row: Row, world: World) -> list[AttentionCall]:
    backend, batch = row.create(world.context), world.batch(0)
    backend.prepare_metadata(batch)
    recorder = Recorder(backend, batch, world)
    for layer, planned in enumerate(world.steps[0].inputs):
        recorder(layer, planned.q, planned.k, planned.v)
    return recorder.calls


def _alone(row: Row, case: Case, device: torch.device, request: int, together: list[AttentionCall]) -> bool:
    """Whether a request computed without its neighbours gives the same bits."""
    world = World(case, RunnerMode.EAGER, PLAIN, row.conventions, device)
    world.keep_only(request)
    start = sum(case.new_lens[:request])
    rows = slice(start, start + case.new_lens[request])
    return all(_equal(call.out, whole.out[rows]) for call, whole in zip(_drive(row, world), together, strict=True))


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a.contiguous()), bits(b.contiguous()))
