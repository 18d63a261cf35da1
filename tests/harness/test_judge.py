"""``judge``: the same verdict for callers who bring outputs and pools instead of a row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.harness.judge import LaidOut, judge, lay_out
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.runners.recorder import ContractError

CASES = (
    "mixed-p16-prefix0.20.5-new17.3.1-h4x2x64-bf16-shuffled",
    "target_verify-p16-prefix14.31-new6.6-h4x2x64-fp32-shuffled-treer.0.0.1.1.2-eagle",
    "lightning-extend-p16-prefix0.8-new15.8-h2x2x128-fp32-shuffled",
)


def run(laid: LaidOut, spoil: Callable[[Tensor], Tensor] = lambda out: out) -> list[Tensor]:
    backend = find_row("torch", laid.case.kind).create(laid.context)
    backend.prepare_metadata(laid.batch)
    return [spoil(backend.forward(each.q, each.k, each.v, layer, laid.batch)) for layer, each in enumerate(laid.layers)]


@pytest.mark.parametrize("probe", ["peaked", "needle", "poison"])
@pytest.mark.parametrize("case_id", CASES)
def test_a_right_run_passes(case_id: str, probe: str) -> None:
    laid = lay_out(parse_case(case_id), probe=probe)
    verdict = judge(laid.case, run(laid), laid)
    assert verdict.passed, verdict
    assert 0 < verdict.margin <= 1


@pytest.mark.parametrize("case_id", CASES)
def test_wrong_outputs_fail_with_a_line_that_says_where(case_id: str) -> None:
    laid = lay_out(parse_case(case_id))
    verdict = judge(laid.case, run(laid, lambda out: out.roll(1, dims=1)), laid)
    assert not verdict.passed
    assert "out of layer" in str(verdict)


def test_a_write_outside_the_batch_fails() -> None:
    laid = lay_out(parse_case(CASES[0]))
    outputs = run(laid)
    assert laid.context.kv is not None
    stray = next(
        slot for slot in range(laid.context.kv.num_slots) if slot not in laid.batch.out_loc and slot not in laid.world.scratch_slots
    )
    laid.context.kv.store(1, torch.tensor([stray]), laid.layers[1].k[:1], laid.layers[1].v[:1])
    verdict = judge(laid.case, outputs, laid)
    assert not verdict.passed
    assert "slots outside out_loc changed" in str(verdict)


def test_a_lost_write_fails() -> None:
    laid = lay_out(parse_case(CASES[0]))
    assert laid.context.kv is not None
    before = laid.context.kv.k(0).clone()
    outputs = run(laid)
    laid.context.kv.k(0).copy_(before)
    assert "do not hold the given K" in str(judge(laid.case, outputs, laid))


def test_misuse_is_refused() -> None:
    laid = lay_out(parse_case(CASES[0]))
    outputs = run(laid)
    with pytest.raises(ValueError, match="laid out for"):
        judge(parse_case(CASES[1]), outputs, laid)
    with pytest.raises(ValueError, match="expected one for each of 2"):
        judge(laid.case, outputs[:1], laid)
    with pytest.raises(ValueError, match="unknown probe"):
        lay_out(laid.case, probe="nosuch")
    with pytest.raises(ContractError, match="shape"):
        judge(laid.case, [out[1:] for out in outputs], laid)
    with pytest.raises(RuntimeError, match="judged already"):
        judge(laid.case, outputs, laid)


def test_both_kinds_are_laid_out() -> None:
    assert {parse_case(case_id).kind for case_id in CASES} == {AttentionKind.SOFTMAX, AttentionKind.LIGHTNING}
