"""Mutants of the installed seg_la kernel file: each one fault made by a text substitution, run through the row in the interpreter.

Every mutant must turn a case of the row's own sampled suite red, by its output, its states or what it wrote: an exception does not count.
Not here: substitutions that change nothing a caller can see (how the value dim is split), and those that write outside the pools, which the
interpreter does to the test's own memory.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backends import seg_la
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.installed import installed_file
from attnmatrix.harness.interpreter import prepare_triton
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.row_suite import row_suite
from attnmatrix.harness.scratch import OutOfBoundsWrite

CPU = torch.device("cpu")
ROW = find_row("seg_la", AttentionKind.LIGHTNING)
EAGER, VERIFY = RunnerMode.EAGER, RunnerMode.VERIFY
pytestmark = pytest.mark.skipif(bool(ROW.missing) or torch.cuda.is_available(), reason="needs sglang, and Triton's interpreter")

CASES = {
    "seg_la_p_kernel": (
        EAGER,
        ("snapshot_alone", "strided_unit_extend", "snapshot_mixed", "zero_prefix_input_page_edges"),
    ),
    "seg_la_d_kernel": (EAGER, ("strided_decode", "page256_decode")),
    "seg_la_mtp_kernel": (VERIFY, ("shard_verify", "strided_loud_verify")),
    "seg_la_sum_kernel": (EAGER, ("long_prefill",)),
    "seg_la_fwd": (EAGER, ("page_size_1", "snapshot_alone", "whole_blocks_on_average")),
}
"""The cases that reach each kernel, cheapest first, by the start of their names."""


@dataclass(frozen=True)
class Mutant:
    """One substitution within one function of the file."""

    name: str
    function: str
    old: str
    new: str

    def text(self, source: str) -> str:
        """The file's text with the substitution. Raises AssertionError when the function does not hold ``old`` exactly once."""
        start = source.index(f"def {self.function}(")
        following = re.search(r"\n(@triton\.jit|def )", source[start + 1 :])
        stop = start + 1 + following.start() if following else len(source)
        body = source[start:stop]
        assert body.count(self.old) == 1, f"{self.function} holds {body.count(self.old)} times {self.old!r}"
        return source[:start] + body.replace(self.old, self.new) + source[stop:]


P, D, MTP, SUM, HOST = CASES
ROUNDED = "state.to(tl.bfloat16).to(tl.float32)"
MUTANTS = (
    Mutant("partial block decays as a whole one", P, "b = min(BLOCK, q_length - n)", "b = BLOCK"),
    Mutant("whole block decays one token less", P, "b = BLOCK\n", "b = BLOCK - 1\n"),
    Mutant("own key masked", P, "offs_b[None, :] <= offs_b[:, None]", "offs_b[None, :] < offs_b[:, None]"),
    Mutant("causal mask dropped", P, "qk = tl.where(offs_b[None, :] <= offs_b[:, None], qk, 0.0)", "qk = qk"),
    Mutant("state part unscaled", P, "tl.dot(q, state) * block_decay * softmax_scale", "tl.dot(q, state) * block_decay"),
    Mutant("state part undecayed", P, "tl.dot(q, state) * block_decay * softmax_scale", "tl.dot(q, state) * softmax_scale"),
    Mutant("state undecayed across blocks", P, "state = state * block_decay + tl.dot(k, v)", "state = state + tl.dot(k, v)"),
    Mutant("state not carried", P, "state = state * block_decay + tl.dot(k, v)", "state = tl.dot(k, v)"),
    Mutant("stale state read without prefix", P, "tl.load(s_ptrs, mask=s_scale > 0)", "tl.load(s_ptrs)"),
    Mutant("prefix state dropped", P, "mask=s_scale > 0", "mask=s_scale > 1"),
    Mutant("first request's prefix flag", P, "tl.load(s_scales + bid)", "tl.load(s_scales)"),
    Mutant("first request's length", P, "tl.load(q_lengths + bid)", "tl.load(q_lengths)"),
    Mutant("first head's slope", P, "decay_scale = -tl.load(decay_scales + hid)", "decay_scale = -tl.load(decay_scales)"),
    Mutant("slot 0 skipped", P, "if s_offset == -1:", "if s_offset < 1:"),
    Mutant("key stride for the query's", P, "+ q_offset * stride_k", "+ q_offset * stride_q"),
    Mutant("final state rounded", P, "tl.store(s_ptrs, state.to(S.dtype.element_ty))", f"tl.store(s_ptrs, {ROUNDED})"),
    Mutant("final state not written", P, "tl.store(s_ptrs, state.to(S.dtype.element_ty))", "pass"),
    Mutant("snapshot at whole blocks only", P, "(n + b == track_len)", "(n + BLOCK == track_len)"),
    Mutant("snapshot one block early", P, "(n + b == track_len)", "(n + b + BLOCK == track_len)"),
    Mutant("snapshot in every later block", P, "(n + b == track_len)", "(n + b >= track_len)"),
    Mutant("snapshot in the live slot", P, "+ track_state_offset * stride_s", "+ s_offset * stride_s"),
    Mutant("snapshot rounded", P, "state.to(S.dtype.element_ty),\n", f"{ROUNDED},\n"),
    Mutant("first request's snapshot length", P, "tl.load(track_lens + bid)", "tl.load(track_lens)"),
    Mutant("snapshots off", HOST, "TRACK_STATE=track_lens is not None and track_state_indices is not None", "TRACK_STATE=False"),
    Mutant("two tokens taken for a decode", HOST, "if MAX_LENGTH > 1:", "if MAX_LENGTH > 2:"),
    Mutant("partial sums of the first key dims only", HOST, "if length < 2048:\n                o = tmp.sum(0)", "if length < 2048:\n                o = tmp[0]"),
    Mutant("whole blocks assumed", HOST, "EVEN = MAX_LENGTH % BLOCK == 0 if bs == 1 else False", "EVEN = MAX_LENGTH % BLOCK == 0"),
    Mutant("new token decayed", D, "state * tl.exp(decay_scale) + k[:, None] * v", "(state + k[:, None] * v) * tl.exp(decay_scale)"),
    Mutant("output before the update", D, "tl.sum(q[:, None] * state, axis=0)", "tl.sum(q[:, None] * (state - k[:, None] * v), axis=0)"),
    Mutant("unscaled", D, "tl.load(q_ptrs).to(tl.float32) * softmax_scale", "tl.load(q_ptrs).to(tl.float32)"),
    Mutant("decode state rounded", D, "tl.store(s_ptrs, state.to(S.dtype.element_ty))", f"tl.store(s_ptrs, {ROUNDED})"),
    Mutant("second key half over the first", D, "+ kid * HEAD_DIM * K_SPLIT_DIM", "+ kid * K_SPLIT_DIM"),
    Mutant("value stride for the query's", D, "V + bid * stride_v", "V + bid * stride_q"),
    Mutant("decode skips slot 0", D, "if s_offset == -1:", "if s_offset < 1:"),
    Mutant("drafts decay by the first head", MTP, "tl.load(decay_scales + hid)", "tl.load(decay_scales)"),
    Mutant("intermediate states over each other", MTP, "c_ptrs += H * HEAD_DIM * HEAD_DIM", "c_ptrs += 0"),
    Mutant(
        "live state advanced",
        MTP,
        "tl.store(c_ptrs, state.to(CACHES.dtype.element_ty))",
        "tl.store(c_ptrs, state.to(CACHES.dtype.element_ty))\n        tl.store(s_ptrs, state.to(S.dtype.element_ty))",
    ),
    Mutant("all drafts in the first row", MTP, "+ cache_indices * stride_c", "+ cache_indices * 0"),
    Mutant("last draft left out", MTP, "for i in range(step):", "for i in range(step - 1):"),
    Mutant("intermediate states rounded", MTP, "tl.store(c_ptrs, state.to(CACHES.dtype.element_ty))", f"tl.store(c_ptrs, {ROUNDED})"),
    Mutant("draft query stride for the key's", MTP, "q_ptrs += stride_q", "q_ptrs += stride_k"),
    Mutant("drafts do not add up", MTP, "state = state * decay_scale + k[:, None] * v", "state = state * decay_scale"),
    Mutant("last partial sum left out", SUM, "for i in range(NUM_BLOCK):", "for i in range(NUM_BLOCK - 1):"),
    Mutant("sum rounded", SUM, "tl.arange(0, DIM), x)", "tl.arange(0, DIM), x.to(tl.bfloat16).to(tl.float32))"),
)  # fmt: skip


def sampled(function: str) -> tuple[tuple[RunnerMode, Case], ...]:
    """The cases of a function, out of those that the row runs by default."""
    mode, names = CASES[function]
    suite = row_suite(ROW, mode, "cpu", full=False)
    found = [next((case for case in suite if case.name.startswith(name)), None) for name in names]
    assert None not in found, f"not in the row's sample: {[name for name, case in zip(names, found, strict=True) if case is None]}"
    return tuple((mode, case) for case in found if case is not None)


def load(text: str, folder: Path) -> ModuleType:
    """The kernel file's ``text`` as a module; Triton reads a kernel's source from its file."""
    path = folder / "seg_la_mutant.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("seg_la_mutant", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["seg_la_mutant"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def statuses(function: str) -> list[str]:
    """What became of each case up to the first red one. A write beside the package's own scratch is a finding of the row's fences, if told by
    an exception."""
    found: list[str] = []
    for mode, case in sampled(function):
        result = run_cell(ROW, mode, case, CPU, controls=(), full=False, diagnosed=False)
        raised = any(trial.error is not None and not isinstance(trial.error, OutOfBoundsWrite) for trial in result.trials)
        found.append("raised" if raised else result.status)
        if found[-1] == "fail":
            break
    return found


@pytest.fixture(scope="module")
def source() -> str:
    prepare_triton(CPU, interpreted=True)
    return installed_file("sglang", "seg_la.py").read_text()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_turns_a_sampled_case_red(mutant: Mutant, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = mutant.text(source)
    assert text != source
    module = load(text, tmp_path)
    monkeypatch.setattr(seg_la, "load_file", lambda distribution, ending: module)
    found = statuses(mutant.function)
    assert found[-1] == "fail", f"not one of {len(found)} cases is red: {found}"


@pytest.mark.parametrize("function", CASES)
def test_the_installed_file_passes_them(function: str) -> None:
    assert set(statuses(function)) == {"pass"}
