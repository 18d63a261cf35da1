"""What is said of FlashInfer's package without running it: which modules a case compiles, and that the stand-in has the package's signatures."""

from __future__ import annotations

import ast
import inspect
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import strict_flashinfer
import strict_flashinfer_wrappers
import strict_flashinfer_xqa
from flashinfer_cells import CELLS, CPU, MASKED, SOFTMAX, TREE, VERIFY, WRAPPERS, XQA

from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backends.flashinfer_lists import lacks_parameter, method_parameters
from attnmatrix.harness.capabilities import NotApplicable, Supported
from attnmatrix.harness.installed import installed_file
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.trial import run_trial


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    strict_flashinfer.install(monkeypatch)


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
    used = {modules.Module(*module) for module in strict_flashinfer_wrappers.MODULES}
    assert used <= wanted
    assert used == wanted or parsed.trees  # a derived tree may be a chain, which needs no mask


def test_the_suite_needs_each_kind_of_module() -> None:
    found = modules.needed(modules.ROWS, tuple(RunnerMode))
    assert {module.kind for module in found} == {"decode", "prefill", "sinks", "xqa", "quantization"}
    assert not any(module.backend == "fa3" and module.dim not in modules.LIKELY_DIMS for module in found)


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
    assert given_names(getattr(getattr(strict_flashinfer_wrappers, owner), method)) == real


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
    owner = strict_flashinfer_xqa if function.startswith("trtllm") else strict_flashinfer_wrappers
    assert given_names(getattr(owner, function)) == tuple(arg.arg for arg in (*real.args, *real.kwonlyargs))


@installed
@pytest.mark.parametrize("case", ["target_verify-p16-prefix20.5-new6.6-h4x2x64-bf16-shuffled-alibi-treer.0.0.1.1.2"])
def test_what_is_not_applicable_is_found_in_the_package(case: str) -> None:
    claim = find_row("fi-fa2", SOFTMAX).capabilities.claim(VERIFY, parse_case(case), "cuda")
    assert isinstance(claim, NotApplicable)
    assert claim.check()
    assert not lacks_parameter(PACKAGE, "flashinfer/prefill.py", "BatchPrefillWithPagedKVCacheWrapper", ("plan",), "custom_mask")
