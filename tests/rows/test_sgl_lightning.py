"""The ``sgl-lightning`` row: the package's class itself, its refusals, and adapters that feed it wrongly."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backends.sgl_lightning import GRAPHS, SglLightning
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Blocked, Capabilities, Conventions
from attnmatrix.harness.cell import CellResult, run_cell
from attnmatrix.harness.context import Context
from attnmatrix.harness.interpreter import prepare_triton
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.refusal import why_not_a_refusal
from attnmatrix.harness.registry import Row, find_row
from attnmatrix.harness.sglang_engine import Pools, Settings, build_backend, load_engine
from attnmatrix.harness.world import World

ROW = find_row("sgl-lightning", AttentionKind.LIGHTNING)
pytestmark = pytest.mark.skipif(bool(ROW.missing), reason=f"{', '.join(ROW.missing)} not installed")

DECODE = "lightning-decode-p16-prefix5.9-new1.1-h1x1x128-fp32-shuffled"
EXTEND = "lightning-extend-p16-prefix0.12-new5.4-h1x1x64-fp32-shuffled"
VERIFY = "lightning-target_verify-p16-prefix5.9-new3.3-h1x1x64-fp32-shuffled"
CELLS = (
    (RunnerMode.EAGER, EXTEND, "pass"),
    (RunnerMode.EAGER, "lightning-extend-p16-prefix0.3-new3.2-h3x3x64-fp32-shuffled-shard1of2", "pass"),
    (RunnerMode.EAGER, "lightning-extend-p16-prefix0-new1-h1x1x128-fp32-shuffled", "known"),
    (RunnerMode.EAGER, "lightning-decode-p16-prefix5-new1-h1x1x64-fp32-shuffled", "blocked"),
    (RunnerMode.EAGER, "lightning-extend-p16-prefix0-new40-h1x1x64-fp32-shuffled-track32", "n/a"),
    (RunnerMode.CG_DECODE, DECODE, "pass"),
    (RunnerMode.VERIFY, VERIFY, "pass"),
    (RunnerMode.VERIFY, "lightning-target_verify-p16-prefix5.9-new3.2-h1x1x64-fp32-shuffled", "known"),
    (RunnerMode.VERIFY, "lightning-target_verify-p1-prefix9-new2-h1x1x64-fp32-shuffled-treer.r", "blocked"),
    (RunnerMode.VERIFY_CG, "lightning-target_verify-p16-prefix9.5-new2.2-h1x1x64-fp32-shuffled-treer.r", "blocked"),
    (RunnerMode.VERIFY_CG, VERIFY, "pass"),
    (RunnerMode.PCG_EXTEND, EXTEND.replace("h1x1x64", "h1x1x128"), "pass"),
)


def run(row: Row, mode: RunnerMode, case: str, device: torch.device, diagnosed: bool = False) -> CellResult:
    return run_cell(row, mode, parse_case(case), device, controls=(), diagnosed=diagnosed)


@pytest.mark.parametrize(("mode", "case", "status"), CELLS, ids=[f"{mode.value}-{case}" for mode, case, _ in CELLS])
def test_cells(mode: RunnerMode, case: str, status: str, device: torch.device) -> None:
    result = run(ROW, mode, case, device)
    assert result.status == status, (result.reason, *result.details)


def context_of(case: str, mode: RunnerMode, device: torch.device) -> Context:
    prepare_triton(device, interpreted=True)
    return World(parse_case(case), mode, PEAKED, Conventions(), device).context


def refusal(claim: Blocked, device: torch.device, **settings: object) -> str | None:
    """What is wrong with the refusal that the class shows, None: nothing."""
    context = context_of(VERIFY, RunnerMode.VERIFY, device)
    engine, pools = load_engine(), Pools(context)
    try:
        build_backend(engine, context, pools, Settings(**settings))  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - the refusal is what is examined
        return why_not_a_refusal(error, claim, ROW)
    return "nothing was raised"


def test_trees_are_refused_by_the_class_when_it_is_built(device: torch.device) -> None:
    claim = ROW.capabilities.claim(RunnerMode.VERIFY, parse_case(CELLS[8][1]), device.type)
    assert isinstance(claim, Blocked)
    assert refusal(claim, device, topk=2) is None
    assert refusal(claim, device, topk=1) == "nothing was raised"


@pytest.mark.parametrize("mode", ["EXTEND", "MIXED", "DRAFT_EXTEND_V2"])
def test_the_class_plans_graphs_of_decode_idle_and_verify_only(mode: str, device: torch.device) -> None:
    context = context_of(VERIFY, RunnerMode.VERIFY, device)
    engine, pools = load_engine(), Pools(context)
    backend = build_backend(engine, context, pools, Settings(topk=1))
    backend.init_cuda_graph_state(2, 6)
    rows, lens = torch.zeros(2, dtype=torch.int64, device=device), torch.ones(2, dtype=torch.int32, device=device)
    given = engine.forward_batch(
        forward_mode=getattr(engine.forward_mode, mode),
        batch_size=2,
        input_ids=rows,
        req_pool_indices=rows,
        seq_lens=lens,
        out_cache_loc=rows,
        seq_lens_sum=2,
    )
    with pytest.raises(ValueError, match="Invalid forward mode") as caught:
        backend.init_forward_metadata_out_graph(given, in_capture=True)
    assert why_not_a_refusal(caught.value, GRAPHS, ROW) is None
    for allowed in ("DECODE", "IDLE"):
        given.forward_mode = getattr(engine.forward_mode, allowed)
        backend.init_forward_metadata_out_graph(given, in_capture=True)


class OtherKernels(SglLightning):
    """Asks for a ``linear_backend`` that is not there."""

    def _build(self, topk: int) -> object:
        return build_backend(self._engine, self.context, self._pools, Settings(topk), linear_backend="no_such")


@pytest.mark.parametrize(("mode", "case"), [(RunnerMode.EAGER, EXTEND), (RunnerMode.EAGER, DECODE), (RunnerMode.VERIFY, VERIFY)])
def test_an_unknown_linear_backend_is_refused_by_the_class(mode: RunnerMode, case: str, device: torch.device) -> None:
    claim = Blocked("unknown linear_backend", "ValueError", "linear backend: no_such is not support")
    row = replace(ROW, create=OtherKernels, capabilities=Capabilities(modes={mode: claim}))
    result = run(row, mode, case, device)
    assert result.status == "blocked", result.reason


class OthersSlots(SglLightning):
    def _tell_slots(self, batch: Batch) -> None:
        assert batch.state_indices is not None
        self._pools.slots[batch.req_pool_indices[: batch.size]] = batch.state_indices[: batch.size].roll(1)


class PrefixForgotten(SglLightning):
    def _forward_batch(self, batch: Batch) -> Any:
        given = super()._forward_batch(batch)
        given.extend_prefix_lens = torch.zeros_like(given.extend_prefix_lens)
        return given


class PaddingTaken(SglLightning):
    """Does not say how many rows are padding."""

    def prepare_for_replay(self, batch: Batch) -> None:
        super().prepare_for_replay(replace(batch, size=batch.padded_reqs))


class NothingRefreshed(SglLightning):
    def prepare_for_replay(self, batch: Batch) -> None:
        pass


class OneModelSlopes(SglLightning):
    """Takes every slice of a model for the whole."""

    def _build(self, topk: int) -> object:
        return build_backend(self._engine, self.context, self._pools, Settings(topk))


@pytest.mark.parametrize(
    ("wrong", "mode", "case"),
    [
        (OthersSlots, RunnerMode.EAGER, EXTEND),
        (PrefixForgotten, RunnerMode.EAGER, EXTEND),
        (PaddingTaken, RunnerMode.CG_DECODE, DECODE),
        (NothingRefreshed, RunnerMode.CG_DECODE, DECODE),
        (NothingRefreshed, RunnerMode.VERIFY_CG, VERIFY),
        (OneModelSlopes, RunnerMode.EAGER, CELLS[1][1]),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "value", "")),
)
def test_a_mistaken_adapter_is_red(wrong: type[SglLightning], mode: RunnerMode, case: str, device: torch.device) -> None:
    result = run(replace(ROW, create=wrong), mode, case, device)
    assert result.status == "fail"


def test_without_the_wheel_it_is_untested() -> None:
    assert replace(ROW, distributions=("no-such-distribution", "triton")).missing == ("no-such-distribution",)
    assert ROW.distributions[0] == "sglang"


def test_the_class_is_the_packages_own() -> None:
    engine = load_engine()
    assert engine.backend.__module__ == "sglang.srt.layers.attention.linear.lightning_backend"
    assert {field.name for field in dataclasses.fields(engine.forward_batch)} >= {"extend_prefix_lens", "mamba_track_mask"}
