"""FlashInfer's rows on a CPU, over a strict stand-in for the package: that the adapters hand over what it asks for, and hand it over anew."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import strict_flashinfer
import torch

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backends.flashinfer_lists import lacks_parameter, method_parameters
from attnmatrix.harness.backends.flashinfer_trtllm import Trtllm, draft_mask
from attnmatrix.harness.backends.flashinfer_wrappers import FlashInfer
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Blocked, NotApplicable, Supported
from attnmatrix.harness.cell import CellResult, run_cell
from attnmatrix.harness.controls import CONTROLS
from attnmatrix.harness.installed import installed_file
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import Row, find_row
from attnmatrix.harness.trial import describe, run_trial
from attnmatrix.harness.world import World
from attnmatrix.references.slopes import alibi_slopes

SOFTMAX, CPU = AttentionKind.SOFTMAX, torch.device("cpu")
EAGER, VERIFY, CG, VERIFY_CG = RunnerMode.EAGER, RunnerMode.VERIFY, RunnerMode.CG_DECODE, RunnerMode.VERIFY_CG
PCG, BCG = RunnerMode.PCG_EXTEND, RunnerMode.BCG_EXTEND
WRAPPERS = ("fi", "fi-fa2", "fi-fa3", "fi-hnd")  # by turns: they differ in names handed over, and in the layout of the pool

CELLS = (
    (EAGER, "extend-p16-prefix0.20.33-new18.7.1-h4x2x64-bf16-shuffled"),
    (EAGER, "extend-p1-prefix2.4-new3.1-h4x2x64-fp16-shuffled"),
    (EAGER, "mixed-p16-prefix0.20.33-new18.7.1-h4x2x64-bf16-shuffled"),
    (EAGER, "extend-p16-prefix0.0.3-new0.0.2-h4x2x64-bf16-shuffled-scratchfirst"),
    (EAGER, "extend-p16-prefix5.9-new2.0-h4x2x64-bf16-shuffled"),
    (EAGER, "idle-p16-prefix-new-h4x2x64-bf16-shuffled"),
    (EAGER, "decode-p16-prefix14.15.16-new1.1.1-h4x2x64-bf16-shuffled"),
    (EAGER, "decode-p16-prefix5.17.64-new1.1.1-h14x2x64-bf16-shuffled-strided"),
    (EAGER, "extend-p16-prefix3.15.48-new1.1.6-h4x2x64-bf16-shuffled-w16-wfirst"),
    (EAGER, "decode-p16-prefix3.15.48-new1.1.1-h4x2x64-bf16-shuffled-w4"),
    (EAGER, "extend-p16-prefix0.20.33-new18.7.1-h4x2x64-bf16-shuffled-cap5"),
    (EAGER, "decode-p16-prefix5.17-new1.1-h4x2x64-bf16-shuffled-cap5"),
    (EAGER, "extend-p16-prefix0.20-new18.7-h4x2x64-bf16-shuffled-sinks"),
    (EAGER, "decode-p16-prefix5.17-new1.1-h4x2x64-bf16-shuffled-w8-wfirst-sinks"),
    (CG, "decode-p16-prefix15.3-new1.1-h4x2x64-bf16-shuffled"),
    (CG, "decode-p16-prefix15.3-new1.1-h4x2x64-bf16-shuffled-w4-wfirst"),
    (CG, "decode-p1-prefix7-new1-h4x2x64-bf16-shuffled-sinks"),
    (PCG, "extend-p16-prefix0.20-new18.7-h4x2x64-bf16-shuffled"),
    (BCG, "extend-p16-prefix0.20-new18.7-h4x2x64-bf16-shuffled"),
    (VERIFY, "target_verify-p16-prefix14.15.16-new4.4.4-h4x2x64-bf16-shuffled"),
    (VERIFY, "target_verify-p16-prefix18.5.40-new2.5.3-h4x2x64-bf16-shuffled-w8"),
    (VERIFY_CG, "target_verify-p16-prefix14.31-new4.4-h4x2x64-bf16-shuffled"),
    (VERIFY_CG, "target_verify-p16-prefix20.5-new4.4-h4x2x64-bf16-shuffled-w4-sinks"),
)
MASKED = (
    (VERIFY, "target_verify-p16-prefix24.7-new6.6-h4x2x64-bf16-shuffled-w8-treer.0.0.1.1.2"),
    (VERIFY, "target_verify-p16-prefix18.5-new5.2-h4x2x64-bf16-shuffled-treer.r.0.1.2_r.r"),
    (VERIFY_CG, "target_verify-p1-prefix9.4-new5.5-h4x2x64-bf16-shuffled-treer.r.0.1.2"),
    (VERIFY_CG, "target_verify-p16-prefix24.7-new6.6-h4x2x64-bf16-shuffled-w8-treer.0.0.1.1.2"),
)
XQA = (
    (EAGER, "decode-p16-prefix14.15.16-new1.1.1-h4x2x64-bf16-shuffled"),
    (EAGER, "decode-p32-prefix3.15.48-new1.1.1-h4x2x64-bf16-shuffled-w4-wfirst-sinks"),
    (CG, "decode-p16-prefix15.3-new1.1-h4x2x64-bf16-shuffled"),
    (VERIFY, "target_verify-p16-prefix14.15.16-new4.4.4-h4x2x64-bf16-shuffled"),
    (VERIFY, "target_verify-p16-prefix20-new1-h4x2x64-bf16-shuffled"),
    (VERIFY, "target_verify-p16-prefix14.31-new6.6-h4x2x64-bf16-shuffled-treer.0.0.1.1.2"),
    (VERIFY_CG, "target_verify-p16-prefix14.31-new6.6-h4x2x64-bf16-shuffled-treer.0.0.1.1.2"),
)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    strict_flashinfer.install(monkeypatch)


def cell(name: str | Row, mode: RunnerMode, case: str, controls: Any = ()) -> CellResult:
    row = find_row(name, SOFTMAX) if isinstance(name, str) else name
    return run_cell(row, mode, parse_case(case), CPU, controls=controls, diagnosed=False)


def in_turn(cells: tuple[tuple[RunnerMode, str], ...], rows: tuple[str, ...]) -> list[Any]:
    taken = [(rows[index % len(rows)], *cell) for index, cell in enumerate(cells)]
    return [pytest.param(*cell, id=f"{cell[0]}-{cell[1].value}-{cell[2]}") for cell in taken]


@pytest.mark.parametrize(
    ("name", "mode", "case"), [*in_turn(CELLS, WRAPPERS), *in_turn(MASKED, ("fi-fa2", "fi-hnd")), *in_turn(XQA, ("trtllm",))]
)
def test_cell(name: str, mode: RunnerMode, case: str) -> None:
    result = cell(name, mode, case)
    assert result.status == "pass", (result.reason, *result.details)
    assert all(trial.graph == "tape" for trial in result.trials) or not mode.uses_graph


@pytest.mark.parametrize("name", ["fi-fa2", "fi-hnd"])
@pytest.mark.parametrize(
    "case", ["extend-p16-prefix0.20-new18.7-h6x2x64-bf16-shuffled-alibi", "decode-p16-prefix5.17.64-new1.1.1-h6x2x64-bf16-shuffled-alibi"]
)
def test_alibi_shifts_the_lse_alone(name: str, case: str) -> None:
    """The package counts ALiBi's distances from the batch's first query, not from each query's position: the output is the same."""
    result = cell(name, EAGER, case)
    assert result.status == "fail"
    assert all(line.startswith("lse of layer") for line in result.details)


@pytest.mark.parametrize(
    ("name", "mode", "case"),
    [
        ("fi-fa2", EAGER, "extend-p16-prefix0.20.33-new18.7.1-h4x2x64-bf16-shuffled-w16"),
        ("fi-fa2", VERIFY_CG, "target_verify-p16-prefix24.7-new6.6-h4x2x64-bf16-shuffled-treer.0.0.1.1.2"),
        ("fi", CG, "decode-p16-prefix15.3-new1.1-h4x2x64-bf16-shuffled-sinks"),
        ("trtllm", CG, "decode-p16-prefix15.3-new1.1-h4x2x64-bf16-shuffled-w8"),
        ("trtllm", VERIFY_CG, "target_verify-p16-prefix14.31-new6.6-h4x2x64-bf16-shuffled-treer.0.0.1.1.2"),
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


class StaleTables(Trtllm):
    """Keeps the page table of the capture."""

    def prepare_for_replay(self, batch: Batch) -> None:
        self._static[batch.padded_reqs].cache_seqlens.copy_(batch.attn_metadata.cache_seqlens)
        batch.attn_metadata = self._static[batch.padded_reqs]


DECODE, TREE = (
    "decode-p16-prefix15.3-new1.1-h4x2x64-bf16-shuffled",
    "target_verify-p16-prefix24.7-new6.6-h4x2x64-bf16-shuffled-treer.0.0.1.1.2",
)


@pytest.mark.parametrize(
    ("name", "mistake", "mode", "case"),
    [
        ("fi-fa2", NotRefreshed, CG, DECODE),
        ("fi-fa2", NotRefreshed, VERIFY_CG, TREE),
        ("fi", InTheEagerBuffers, CG, DECODE),
        ("fi-fa2", SharedPlan, EAGER, "extend-p16-prefix0.20-new18.7-h4x2x64-bf16-shuffled"),
        ("fi-fa2", OneWindow, EAGER, "decode-p16-prefix3.15.48-new1.1.1-h4x2x64-bf16-shuffled-w4-wfirst"),
        ("trtllm", StaleTables, CG, DECODE),
    ],
)
def test_a_mistake_of_the_adapter_is_found(name: str, mistake: Callable[..., Any], mode: RunnerMode, case: str) -> None:
    row = find_row(name, SOFTMAX)
    choice = getattr(row.create, "keywords", {})
    wrong = replace(row, create=partial(mistake, **choice))
    assert cell(wrong, mode, case).status == "fail"


@pytest.mark.parametrize(
    ("name", "mode", "case", "said"),
    [
        ("fi-fa3", VERIFY, TREE, "operation not supported"),
        ("trtllm", EAGER, "extend-p16-prefix0-new16-h4x2x64-bf16-shuffled", "Artifact not found locally"),
        ("trtllm", EAGER, "decode-p1-prefix5-new1-h4x2x64-bf16-shuffled", "Invalid page_size: 1, only 16, 32, 64, 128"),
        ("trtllm", VERIFY, "target_verify-p16-prefix18.5.40-new2.5.3-h4x2x64-bf16-shuffled", "does not support cum_seq_lens_q"),
    ],
)
def test_a_declared_refusal_reaches_the_caller(name: str, mode: RunnerMode, case: str, said: str) -> None:
    row, parsed = find_row(name, SOFTMAX), parse_case(case)
    claim = row.capabilities.claim(mode, parsed, "cuda")
    trial = run_trial(row, mode, parsed, CPU, PEAKED)
    assert isinstance(claim, Blocked)
    assert type(trial.error).__name__ == claim.exception
    assert trial.untouched
    assert said in str(trial.error)


MODULES = spec_from_file_location("flashinfer_modules", Path(__file__).parents[2] / "ci" / "flashinfer_modules.py")
assert MODULES is not None
assert MODULES.loader is not None
modules = module_from_spec(MODULES)
MODULES.loader.exec_module(modules)


@pytest.mark.parametrize("name", [*WRAPPERS, "trtllm"])
@pytest.mark.parametrize(
    ("mode", "case"),
    [CELLS[6], CELLS[8], CELLS[11], CELLS[13], MASKED[0], (VERIFY, f"{TREE}-s1"), XQA[1], XQA[5]],
    ids=str,
)
def test_the_modules_built_beforehand_are_those_a_case_needs(name: str, mode: RunnerMode, case: str) -> None:
    row, parsed = find_row(name, SOFTMAX), parse_case(case)
    wanted = modules.modules_of(name, parsed)
    if isinstance(row.capabilities.claim(mode, parsed, "cuda"), Supported):
        run_trial(row, mode, parsed, CPU, PEAKED)
    used = {modules.Module(*module) for module in strict_flashinfer.MODULES}
    assert used <= wanted
    assert used == wanted or parsed.trees  # a derived tree may be a chain, which needs no mask


def test_the_suite_needs_each_kind_of_module() -> None:
    found = modules.needed(modules.ROWS, tuple(RunnerMode))
    assert {module.kind for module in found} == {"decode", "prefill", "sinks", "xqa", "quantization"}
    assert not any(module.backend == "fa3" and module.dim not in modules.LIKELY_DIMS for module in found)


@pytest.mark.parametrize("mode", [EAGER, CG])
def test_fa3_leaves_alibi_out(mode: RunnerMode) -> None:
    """The stand-in models that its kernels have no bias; the row claims nothing else, so the cell is red."""
    assert cell("fi-fa3", mode, "decode-p16-prefix40.17-new1.1-h4x2x64-bf16-shuffled-alibi").status == "fail"


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 7, 12, 14, 28, 40, 64])
def test_the_packages_formula_for_slopes_is_the_references(heads: int) -> None:
    torch.testing.assert_close(strict_flashinfer.slopes(heads), alibi_slopes(heads).float(), rtol=1e-6, atol=0)


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


def test_words_of_a_mask_hold_the_lowest_bit_first() -> None:
    seen = torch.ones(40, 40, dtype=torch.bool).tril().repeat(2, 1)
    packed = draft_mask(seen, 40)
    assert tuple(packed.shape) == (2, 40, 2)
    assert packed[1, :3, 0].tolist() == [1, 3, 7]
    assert packed[0, 31:34].tolist() == [[-1, 0], [-1, 1], [-1, 3]]


def test_a_graph_for_chains_refuses_trees() -> None:
    chain = "target_verify-p16-prefix24.7-new6.6-h4x2x64-bf16-shuffled"
    row = find_row("fi-fa2", SOFTMAX)
    trees = run_trial(row, VERIFY_CG, parse_case(f"{chain}-treer.0.1.2.3.4"), CPU, PEAKED)  # a chain at capture, then others
    assert not trees.passed
    assert "captured for chains" in describe(trees)[0]


PACKAGE = "flashinfer-python"
installed = pytest.mark.skipif(bool(find_row("fi", SOFTMAX).missing), reason="flashinfer is not installed")


def given_names(function: Any) -> tuple[str, ...]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind not in kinds)


@installed
@pytest.mark.parametrize(("file", "kind"), [("prefill", "Prefill"), ("decode", "Decode")])
@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_the_stand_in_takes_what_the_wrappers_take(file: str, kind: str, method: str) -> None:
    owner = f"Batch{kind}WithPagedKVCacheWrapper"
    real = method_parameters(PACKAGE, f"flashinfer/{file}.py", owner, method)
    assert given_names(getattr(getattr(strict_flashinfer, owner), method)) == real


@installed
@pytest.mark.parametrize(
    ("file", "function"),
    [
        ("decode.py", "trtllm_batch_decode_with_kv_cache"),
        ("prefill.py", "trtllm_batch_context_with_kv_cache"),
        ("utils.py", "determine_attention_backend"),
        ("jit/attention/modules.py", "get_batch_prefill_attention_sink_uri"),
    ],
)
def test_the_stand_in_takes_what_the_functions_take(file: str, function: str) -> None:
    tree = ast.parse(installed_file(PACKAGE, f"flashinfer/{file}").read_text())
    real = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function).args
    assert given_names(getattr(strict_flashinfer, function)) == tuple(arg.arg for arg in (*real.args, *real.kwonlyargs))


@installed
@pytest.mark.parametrize("case", ["target_verify-p16-prefix20.5-new6.6-h4x2x64-bf16-shuffled-alibi-treer.0.0.1.1.2"])
def test_what_is_not_applicable_is_found_in_the_package(case: str) -> None:
    claim = find_row("fi-fa2", SOFTMAX).capabilities.claim(VERIFY, parse_case(case), "cuda")
    assert isinstance(claim, NotApplicable)
    assert claim.check()
    assert not lacks_parameter(PACKAGE, "flashinfer/prefill.py", "BatchPrefillWithPagedKVCacheWrapper", ("plan",), "custom_mask")
