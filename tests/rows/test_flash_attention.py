"""The FlashAttention rows over strict stand-ins for their packages: every mode on the CPU, and adapter mistakes that must show."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from flash_attention_doubles import FlashAttn2, FlashAttn3Forward, FlashAttn4, TorchVarlen

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends import fa2, fa3, fa4, torch_varlen
from attnmatrix.harness.backends.paged_kernel import PagedKernel
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Blocked, NotApplicable, Supported
from attnmatrix.harness.cell import CellResult, run_cell
from attnmatrix.harness.context import Context
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.signature import parameters
from attnmatrix.matrix.findings import fa2_one_token_beside_none_raises, torch_varlen_splits_mix_requests

EAGER, VERIFY, CG, VERIFY_CG = RunnerMode.EAGER, RunnerMode.VERIFY, RunnerMode.CG_DECODE, RunnerMode.VERIFY_CG
PCG, BCG = RunnerMode.PCG_EXTEND, RunnerMode.BCG_EXTEND
CPU = torch.device("cpu")
ROWS: dict[str, tuple[ModuleType, Any]] = {
    "fa2": (fa2, FlashAttn2),
    "fa4": (fa4, FlashAttn4),
    "torch-varlen-1": (torch_varlen, TorchVarlen),
}
PAGES = {"fa2": 256, "fa4": 16, "torch-varlen-1": 256}
CELLS = (
    (EAGER, "extend-p{page}-prefix0.{page}.20-new18.7.1-h4x2x32-bf16-shuffled"),
    (EAGER, "extend-p{page}-prefix5.9-new2.0-h4x4x32-fp16-shuffled"),
    (EAGER, "mixed-p{page}-prefix0.20.33-new8.3.1-h4x4x32-bf16-shuffled-strided"),
    (EAGER, "decode-p{page}-prefix15.{page}.3-new1.1.1-h4x2x32-bf16-shuffled"),
    (EAGER, "decode-p{page}-prefix3.4.12-new1.1.1-h4x2x32-bf16-shuffled-w4"),
    (EAGER, "extend-p{page}-prefix0.8-new7.5-h4x2x32-bf16-shuffled-w4-wfirst"),
    (EAGER, "idle-p{page}-prefix-new-h4x2x32-bf16-shuffled"),
    (CG, "decode-p{page}-prefix20.{page}-new1.1-h4x2x32-bf16-shuffled"),
    (CG, "decode-p{page}-prefix5.17-new1.1-h4x2x32-bf16-shuffled-w4"),
    (PCG, "extend-p{page}-prefix0.20-new8.3-h4x2x32-bf16-shuffled"),
    (BCG, "extend-p{page}-prefix0.20-new8.3-h4x2x32-bf16-shuffled"),
    (VERIFY, "target_verify-p{page}-prefix14.31-new4.4-h4x2x32-bf16-shuffled"),
    (VERIFY, "target_verify-p{page}-prefix18.5-new2.4-h4x2x32-bf16-shuffled"),
    (VERIFY_CG, "target_verify-p{page}-prefix14.31-new3.3-h4x2x32-bf16-shuffled"),
)
OPTIONS = (
    ("fa2", EAGER, "extend-p256-prefix0.20-new8.3-h4x2x32-bf16-shuffled-cap5-gain4"),
    ("fa2", EAGER, "extend-p256-prefix5.9-new1.1-h4x2x32-bf16-shuffled"),
    ("fa2", EAGER, "extend-p256-prefix5.9-new1.0-h4x4x32-bf16-shuffled"),
    ("fa2", EAGER, "extend-p256-prefix5.9-new1.0-h4x2x32-bf16-shuffled-w4"),
    ("fa2", EAGER, "extend-p256-prefix0.20-new8.3-h4x2x32-bf16-shuffled-alibi"),
    ("fa2", CG, "decode-p256-prefix20.9-new1.1-h4x2x32-bf16-shuffled-alibi"),
    ("torch-varlen", EAGER, "extend-p256-prefix0.20-new8.3-h4x2x32-bf16-shuffled"),
    ("torch-varlen", PCG, "extend-p256-prefix0.20-new8.3-h4x2x32-bf16-shuffled"),
    ("fa4", EAGER, "extend-p16-prefix0.20-new8.3-h4x2x32-bf16-shuffled-cap5-gain4"),
    ("fa4", EAGER, "extend-p16-prefix0.20-new8.3-h4x2x32-bf16-shuffled-sinks"),
    ("fa4", CG, "decode-p1-prefix20.9-new1.1-h4x2x32-bf16-shuffled-sinks"),
)
ENOUGH = (0, 3, 4, 7, 11, 13)  # of CELLS, for a row whose calls differ from fa2's in one argument list
TRIED = [
    (name, mode, case.format(page=PAGES[name]))
    for name in ROWS
    for number, (mode, case) in enumerate(CELLS)
    if name != "torch-varlen-1" or number in ENOUGH
] + list(OPTIONS)


@pytest.fixture(autouse=True)
def all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, double in ((fa2, FlashAttn2), (fa3, FlashAttn3Forward), (fa4, FlashAttn4), (torch_varlen, TorchVarlen)):
        monkeypatch.setattr(module, "load", lambda double=double: double)
    monkeypatch.setattr(fa2, "installed_version", lambda name: "2.8.3")
    monkeypatch.setattr(torch_varlen, "_lacks", lambda pattern: pattern not in ("block_table", "seqused_k"))


def run(name: str, mode: RunnerMode, case: str, create: Callable[[Context], AttentionBackend] | None = None) -> CellResult:
    row = find_row(name, AttentionKind.SOFTMAX)
    row = replace(
        row,
        create=create or row.create,
        devices=("cpu",),
        slow_on_cpu=True,
        source=__file__ if create else row.source,
        distributions=("torch",),
    )
    torch.set_num_threads(1)
    return run_cell(row, mode, parse_case(case), CPU, controls=(), full=False, diagnosed=create is None)


@pytest.mark.parametrize(("name", "mode", "case"), TRIED, ids=[f"{n}-{m.value}-{c}" for n, m, c in TRIED])
def test_the_adapter_passes_over_its_stand_in(name: str, mode: RunnerMode, case: str) -> None:
    result = run(name, mode, case)
    assert result.status == "pass", (result.reason, *result.details)
    if mode.uses_graph:
        assert all(trial.graph == "tape" and trial.replays >= 6 for trial in result.trials)


@pytest.mark.parametrize(
    "case", ["extend-p256-prefix5.9-new1.0-h4x2x32-bf16-shuffled", "extend-p256-prefix5.9-new2.0-h4x2x32-fp16-shuffled"]
)
def test_one_token_beside_a_request_without_any_is_a_known_fault(case: str) -> None:
    """In the case itself, or in a batch derived from it."""
    result = run("fa2", EAGER, case)
    assert result.status == "known", (result.reason, *result.details)
    assert "fa2_one_token_beside_none_raises" in result.reason


@pytest.mark.parametrize(("mode", "case"), [CELLS[0], CELLS[3], CELLS[7], CELLS[8], CELLS[13]])
def test_split_keys_of_several_requests_are_a_known_fault(mode: RunnerMode, case: str) -> None:
    """In an eager batch with more than a block of keys, and in any graph: it is captured for a page more than a case fills."""
    result = run("torch-varlen", mode, case.format(page=256))
    assert result.status == "known", (result.reason, *result.details)
    assert "torch_varlen_splits_mix_requests" in result.reason


@pytest.mark.parametrize(
    ("batch", "splits"),
    [((2, 4, 1, 301, 128), 3), ((1, 4, 1, 301, 128), 3), ((2, 4, 1, 120, 128), 1), ((2, 4, 3, 301, 64), 2), ((60, 4, 1, 4000, 64), 1)],
)
def test_keys_are_split_where_the_batch_does_not_fill_the_gpu(batch: tuple[int, int, int, int, int], splits: int) -> None:
    assert torch_varlen.chosen_splits(*batch) == splits


def test_a_reproduction_shows_the_mixed_splits_of_the_stand_in() -> None:
    errors = torch_varlen_splits_mix_requests.main("cpu", TorchVarlen)
    assert errors["one split"] < 5e-3 < 0.3 < errors["right"]


def test_the_reproduction_shows_it_of_the_stand_in() -> None:
    errors = fa2_one_token_beside_none_raises.main("cpu", FlashAttn2)
    assert errors["alone"] < 5e-3 < 0.3 < errors["beside a request without tokens"]


class TableOfTheCapture(PagedKernel):
    """Replays read the page table of the replay before."""

    def prepare_for_replay(self, batch: Batch) -> None:
        kept = self._static[batch.padded_reqs].page_table.clone()
        super().prepare_for_replay(batch)
        self._static[batch.padded_reqs].page_table.copy_(kept)


class LengthsOfTheCapture(PagedKernel):
    """Replays read the lengths of the replay before."""

    def prepare_for_replay(self, batch: Batch) -> None:
        static = self._static[batch.padded_reqs]
        kept = static.cache_seqlens.clone(), static.cu_seqlens_k.clone()
        super().prepare_for_replay(batch)
        static.cache_seqlens.copy_(kept[0])
        static.cu_seqlens_k.copy_(kept[1])


class PrefixTakenForTotal(PagedKernel):
    """``seq_lens`` read as the total where it counts the prefix."""

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        if batch.forward_mode.seq_lens_is_prefix:
            batch.attn_metadata.cache_seqlens = batch.seq_lens


class WindowCountsItself(PagedKernel):
    """A window one key too large."""

    def __init__(self, context: Context, attend: Any) -> None:
        super().__init__(replace(context, windows=tuple(w if w is None else w + 1 for w in context.windows)), attend)


class SlotsForPages(PagedKernel):
    """Slots handed over as page numbers."""

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        assert self.context.kv is not None
        meta = batch.attn_metadata
        meta.page_table = (meta.page_table * self.context.page_size) % self.context.kv.num_pages


MISTAKES = (
    (TableOfTheCapture, CG, CELLS[7][1]),
    (LengthsOfTheCapture, CG, CELLS[7][1]),
    (LengthsOfTheCapture, VERIFY_CG, CELLS[13][1]),
    (PrefixTakenForTotal, VERIFY, CELLS[11][1]),
    (PrefixTakenForTotal, VERIFY_CG, CELLS[13][1]),
    (WindowCountsItself, EAGER, CELLS[4][1]),
    (SlotsForPages, EAGER, CELLS[0][1]),
)


@pytest.mark.parametrize("name", ["fa2", "fa4"])
@pytest.mark.parametrize(("mistake", "mode", "case"), MISTAKES, ids=[f"{m[0].__name__}-{m[1].value}" for m in MISTAKES])
def test_a_mistake_of_the_adapter_is_red(name: str, mistake: type[PagedKernel], mode: RunnerMode, case: str) -> None:
    module, double = ROWS[name]

    def create(context: Context) -> AttentionBackend:
        return mistake(context, partial(module.attend, double))

    result = run(name, mode, case.format(page=PAGES[name]), create)
    assert result.status == "fail", mistake.__doc__
    assert all(trial.error is None for trial in result.trials), "an exception proves nothing"


BLOCKED = (
    ("fa2", "decode-p16-prefix5-new1-h4x2x64-bf16-shuffled", "divisible by 256"),
    ("fa2", "decode-p256-prefix5-new1-h4x2x64-fp32-shuffled", "only support fp16 and bf16"),
    ("fa3", "decode-p16-prefix5-new1-h4x2x64-bf16-shuffled", "does not support paged KV"),
    ("fa3", "decode-p16-prefix5-new1-h4x2x64-fp16-shuffled", "does not support paged KV"),
    ("fa3", "extend-p256-prefix5-new130-h4x2x64-fp16-shuffled", "does not support FP16"),
    ("fa3", "extend-p256-prefix5-new3-h4x2x64-bf16-shuffled-w4", "local attention"),
    ("fa3", "decode-p16-prefix5-new1-h4x2x64-fp32-shuffled", "only supports fp16, bf16"),
    ("fa4", "decode-p16-prefix5-new1-h4x2x64-fp32-shuffled", "inputs must be float16"),
    ("torch-varlen", "decode-p16-prefix5-new1-h4x2x64-bf16-shuffled", "divisible by 256"),
    ("torch-varlen", "extend-p256-prefix5-new3-h4x2x64-fp32-shuffled", "only support fp16 and bf16"),
)


@pytest.mark.parametrize(("name", "case", "message"), BLOCKED, ids=[f"{b[0]}-{b[1]}" for b in BLOCKED])
def test_limits_are_declared_with_the_messages_of_the_package(name: str, case: str, message: str) -> None:
    row, parsed = find_row(name, AttentionKind.SOFTMAX), parse_case(case)
    claim = row.capabilities.claim(EAGER, parsed, "cuda")
    assert isinstance(claim, Blocked)
    result = run(name, EAGER, case)
    error = result.trials[0].error
    assert error is not None and type(error).__name__ == claim.exception
    assert message in str(error)
    assert re.search(claim.match, str(error))
    assert result.trials[0].untouched


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4", "torch-varlen", "torch-varlen-1"])
def test_trees_have_no_argument(name: str) -> None:
    tree = parse_case("target_verify-p256-prefix9-new3-h4x2x64-bf16-shuffled-treer.r.0")
    assert isinstance(find_row(name, AttentionKind.SOFTMAX).capabilities.claim(VERIFY, tree, "cuda"), NotApplicable)


def test_a_local_build_claims_the_head_dims_that_its_version_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa2, "installed_version", lambda name: "2.8.3+local-subset.64.128")
    row = find_row("fa2", AttentionKind.SOFTMAX)
    claims = [
        row.capabilities.claim(EAGER, parse_case(f"decode-p256-prefix5-new1-h4x2x{dim}-bf16-shuffled"), "cuda")
        for dim in (40, 64, 80, 128, 256)
    ]
    assert [type(claim) for claim in claims] == [Supported, Supported, Blocked, Supported, Blocked]
    assert fa2.built_dims("2.8.3+local.subset.64") == (64,)
    assert fa2.built_dims("2.8.3") == fa2.KERNEL_DIMS
    assert isinstance(claims[2], Blocked)
    assert all(re.search(claims[2].match, text) for text in ("not built", "not built\nException raised from run_mha_fwd"))


@pytest.mark.parametrize(
    ("distribution", "file", "double"),
    [
        (fa2.PACKAGE, fa2.INTERFACE, FlashAttn2.flash_attn_varlen_func),
        (fa2.PACKAGE, fa2.INTERFACE, FlashAttn2.flash_attn_with_kvcache),
        (fa3.PACKAGE, "fa3_fwd_interface.py", FlashAttn3Forward.flash_attn_with_kvcache),
        (fa4.PACKAGE, fa4.INTERFACE, FlashAttn4.flash_attn_varlen_func),
        ("torch", torch_varlen.FILE, TorchVarlen.varlen_attn),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_the_stand_in_has_the_parameters_of_the_installed_function(distribution: str, file: str, double: Callable[..., Any]) -> None:
    try:
        real = parameters(distribution, file, double.__name__)
    except LookupError as error:
        pytest.skip(str(error))
    if distribution == "torch" and "block_table" not in real:
        pytest.skip("this torch takes no page table")
    assert real == tuple(inspect.signature(double).parameters)


def test_rows_share_the_adapter_in_their_fingerprint() -> None:
    shared = inspect.getfile(PagedKernel)
    assert all(shared in find_row(name, AttentionKind.SOFTMAX).more_sources for name in (*ROWS, "fa3"))
