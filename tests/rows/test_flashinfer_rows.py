"""FlashInfer's wrapper rows on a CPU, over a strict stand-in for the package: that the adapter hands over what it asks for, and hands it over
anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import strict_flashinfer
import torch
from flashinfer_cells import CELLS, CG, CPU, DECODE, EAGER, MASKED, QUANTISED, SOFTMAX, TREE, VERIFY, VERIFY_CG, WRAPPERS, cell
from strict_flashinfer_attention import slopes

from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backends.flashinfer_wrappers import FlashInfer
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Blocked
from attnmatrix.harness.controls import CONTROLS
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.trial import describe, run_trial
from attnmatrix.harness.world import World
from attnmatrix.references.slopes import alibi_slopes


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    strict_flashinfer.install(monkeypatch)


def in_turn(cells: tuple[tuple[RunnerMode, str], ...], rows: tuple[str, ...]) -> list[Any]:
    taken = [(rows[index % len(rows)], *cell) for index, cell in enumerate(cells)]
    return [pytest.param(*cell, id=f"{cell[0]}-{cell[1].value}-{cell[2]}") for cell in taken]


@pytest.mark.parametrize(
    ("name", "mode", "case"),
    [*in_turn(CELLS, WRAPPERS), *in_turn(MASKED, ("fi-fa2", "fi-hnd")), *in_turn(QUANTISED, ("fi", "fi-fa2", "fi-hnd"))],
)
def test_cell(name: str, mode: RunnerMode, case: str) -> None:
    result = cell(name, mode, case)
    assert result.status == "pass", (result.reason, *result.details)
    assert all(trial.graph == "tape" for trial in result.trials) or not mode.uses_graph


@pytest.mark.parametrize(
    ("name", "mode", "case"),
    [
        ("fi-fa2", EAGER, "extend-p16-prefix0.20.33-new18.7.1-h4x2x64-bf16-shuffled-w16"),
        ("fi-fa2", VERIFY_CG, TREE),
        ("fi", CG, f"{DECODE}-sinks"),
    ],
)
def test_every_control_is_rejected(name: str, mode: RunnerMode, case: str) -> None:
    controls = [control for control in CONTROLS if control.applies(parse_case(case))]
    result = cell(name, mode, case, controls)
    assert result.status == "pass", (result.reason, *result.details)
    assert result.controls
    assert all(count.rejected == count.tried and not count.raised for count in result.controls.values())


class NotRefreshed(FlashInfer):
    """Forgets to plan again."""

    def prepare_for_replay(self, batch: Batch) -> None:
        batch.attn_metadata = self._static[batch.padded_reqs]


class InTheEagerBuffers(FlashInfer):
    """Refreshes a wrapper that the graph has never seen."""

    def prepare_for_replay(self, batch: Batch) -> None:
        pass


class SharedPlan(FlashInfer):
    """One wrapper for whatever is prepared."""

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        meta = batch.attn_metadata
        self._kept = getattr(self, "_kept", meta.planned)
        for window, planned in self._kept.items():
            planned.plan(meta.lists, meta.masks.get(window))
        meta.planned = self._kept


class OneWindow(FlashInfer):
    """Takes the first layer's plan for all layers."""

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        planned = batch.attn_metadata.planned
        batch.attn_metadata.planned = dict.fromkeys(planned, next(iter(planned.values())))


@pytest.mark.parametrize(
    ("name", "mistake", "mode", "case"),
    [
        ("fi-fa2", NotRefreshed, CG, DECODE),
        ("fi-fa2", NotRefreshed, VERIFY_CG, TREE),
        ("fi", InTheEagerBuffers, CG, DECODE),
        ("fi-fa2", SharedPlan, EAGER, "extend-p16-prefix0.20-new18.7-h4x2x64-bf16-shuffled"),
        ("fi-fa2", OneWindow, EAGER, "decode-p16-prefix3.15.48-new1.1.1-h4x2x64-bf16-shuffled-w4-wfirst"),
    ],
)
def test_a_mistake_of_the_adapter_is_found(name: str, mistake: Callable[..., Any], mode: RunnerMode, case: str) -> None:
    row = find_row(name, SOFTMAX)
    choice = getattr(row.create, "keywords", {})
    wrong = replace(row, create=partial(mistake, **choice))
    assert cell(wrong, mode, case).status == "fail"


def test_a_declared_refusal_reaches_the_caller() -> None:
    row, parsed = find_row("fi-fa3", SOFTMAX), parse_case(TREE)
    claim = row.capabilities.claim(VERIFY, parsed, "cuda")
    trial = run_trial(row, VERIFY, parsed, CPU, PEAKED)
    assert isinstance(claim, Blocked)
    assert type(trial.error).__name__ == claim.exception
    assert trial.untouched
    assert "operation not supported" in str(trial.error)


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 7, 12, 14, 28, 40, 64])
def test_the_packages_formula_for_slopes_is_the_references(heads: int) -> None:
    torch.testing.assert_close(slopes(heads), alibi_slopes(heads).float(), rtol=1e-6, atol=0)


def test_lse_is_natural() -> None:
    case = parse_case("extend-p16-prefix0.8-new5.3-h2x1x64-bf16-shuffled")
    row = find_row("fi", SOFTMAX)
    world = World(case, EAGER, PEAKED, row.conventions, CPU)
    backend, batch, given = row.create(world.context), world.batch(0), world.steps[0].inputs[0]
    backend.prepare_metadata(batch)
    out, lse = backend.forward_with_lse(given.q, given.k, given.v, 0, batch)
    group = given.k.repeat_interleave(2, dim=1)
    score = torch.einsum("nhd,khd->nhk", given.q[:5].float(), group[:5].float()) * world.context.scale
    expected = score.masked_fill(~torch.ones(5, 5).tril().bool()[:, None], float("-inf")).logsumexp(dim=-1)
    torch.testing.assert_close(lse[:5], expected, rtol=1e-4, atol=1e-4)
    assert out.shape == given.q.shape


def test_a_graph_for_chains_refuses_trees() -> None:
    chain = "target_verify-p16-prefix24.7-new6.6-h4x2x64-bf16-shuffled"
    row = find_row("fi-fa2", SOFTMAX)
    trees = run_trial(row, VERIFY_CG, parse_case(f"{chain}-treer.0.1.2.3.4"), CPU, PEAKED)  # a chain at capture, then others
    assert not trees.passed
    assert "captured for chains" in describe(trees)[0]
