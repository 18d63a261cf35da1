"""Rounding steps: a row is red without the step it names, and a step without its rounding is the textbook sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.baseline import softmax_baseline
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.decay_rounding import chunked_decay
from attnmatrix.harness.flash_rounding import PARTS_ROUNDED, TANH_APPROXIMATED, TANH_UNIT
from attnmatrix.harness.measure import FACTOR, absolute_error, limits
from attnmatrix.harness.registry import Row, find_row
from attnmatrix.harness.rounding import (
    CHUNK_OPERANDS,
    ELEMENT_PRODUCTS,
    PARTIAL_SUMS,
    ROUNDED_AFTER_USE,
    ROUNDED_AND_SPLIT,
    SINK_RESCALE,
    TF32_PRODUCTS,
    WEIGHTS_ADDED,
    WEIGHTS_ROUNDED,
)
from attnmatrix.harness.softmax_rounding import softmax_rounded
from attnmatrix.references.decayed_state import decayed_state_attention

NEEDED = (
    ("seg_la", AttentionKind.LIGHTNING, "lightning-extend-p16-prefix0.8-new9.4-h1x1x128-bf16-shuffled"),
    ("sgl-triton", AttentionKind.SOFTMAX, "decode-p16-prefix40.140-new1.1-h2x2x128-fp16-shuffled-gain4"),
    ("conch", AttentionKind.SOFTMAX, "decode-p16-prefix40.140-new1.1-h2x1x64-fp16-shuffled"),
)


def without_steps(row: Row) -> Row:
    return replace(row, conventions=replace(row.conventions, rounding=()))


@pytest.mark.parametrize(("name", "kind", "case"), NEEDED)
def test_the_row_is_red_without_its_steps_and_green_with_them(name: str, kind: AttentionKind, case: str, device: torch.device) -> None:
    row = find_row(name, kind)
    if row.missing:
        pytest.skip(f"{name}: package not installed")
    bare = run_cell(without_steps(row), RunnerMode.EAGER, parse_case(case), device, controls=(), diagnosed=False)
    assert bare.status == "fail"
    assert run_cell(row, RunnerMode.EAGER, parse_case(case), device, controls=()).status == "pass"


def inputs(dtype: torch.dtype, new: int = 5, kv: int = 70) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, heads, 32, generator=generator).to(dtype) for n, heads in ((new, 4), (kv, 2), (kv, 2)))
    mask = torch.arange(kv)[None, :] <= torch.arange(new)[:, None] + kv - new
    return q, k, v, mask


@pytest.mark.parametrize("steps", [[ROUNDED_AFTER_USE], [ROUNDED_AND_SPLIT], [ROUNDED_AND_SPLIT, WEIGHTS_ADDED]])
@pytest.mark.parametrize("longest", [70, 4000])
def test_running_state_in_float32_is_the_textbook_softmax(steps: list[str], longest: int) -> None:
    q, k, v, mask = inputs(torch.float32)
    out, lse = softmax_rounded(steps)(q, k, v, mask, 0.2, page_size=16, longest=longest)
    plain, plain_lse = softmax_baseline(q, k, v, mask, 0.2)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(lse, plain_lse)


@pytest.mark.parametrize("step", [ROUNDED_AFTER_USE, ROUNDED_AND_SPLIT])
def test_running_state_in_bf16_is_further_off_than_the_textbook(step: str) -> None:
    q, k, v, mask = inputs(torch.bfloat16)
    exact = softmax_baseline(*(t.double() for t in (q, k, v)), mask, 0.2)[0]
    rounded = softmax_rounded([step])(q, k, v, mask, 0.2, page_size=16, longest=70)[0]
    assert (rounded - exact).norm() > 1.5 * (softmax_baseline(q, k, v, mask, 0.2)[0] - exact).norm()


def test_element_products_in_float32_are_the_textbook_softmax_and_in_bf16_further_off() -> None:
    for dtype, low, high in ((torch.float32, 0.0, 1e-5), (torch.bfloat16, 1.5, 20.0)):
        q, k, v, mask = inputs(dtype)
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        exact = softmax_baseline(*(t.double() for t in (q, k, v)), mask, 2.0)[0]
        rounded = softmax_rounded([ELEMENT_PRODUCTS])(q, k, v, mask, 2.0, page_size=16, longest=70)[0]
        size = exact if dtype is torch.float32 else softmax_baseline(q, k, v, mask, 2.0)[0] - exact
        assert low <= (rounded - exact).norm() / size.norm() < high


def test_sums_of_rounded_weights_in_float32_are_the_textbook_and_in_bf16_move_the_lse() -> None:
    sinks = torch.randn(4)
    for dtype, low, high in ((torch.float32, 0.0, 1e-5), (torch.bfloat16, 1e-5, 1e-2)):
        q, k, v, mask = inputs(dtype)
        exact, right = softmax_baseline(q.float(), k.float(), v.float(), mask, 0.2, sinks=sinks)
        out, lse = softmax_rounded([WEIGHTS_ROUNDED])(q, k, v, mask, 0.2, page_size=16, longest=70, sinks=sinks)
        assert low <= float((lse - right).abs().max()) < high
        assert (out.float() - exact).norm() / exact.norm() < 1e-2


def split_lse(q: torch.Tensor, k: torch.Tensor, scale: float, splits: int) -> torch.Tensor:
    """A right kernel's LSE: the weights of each split rounded relative to its own largest, the splits merged in float32."""
    lses = []
    for part in k.chunk(splits):
        score = torch.einsum("nhd,khd->nhk", q.float(), part.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)) * scale
        peak = score.amax(dim=-1, keepdim=True)
        lses.append((peak + torch.exp(score - peak).to(q.dtype).float().sum(dim=-1, keepdim=True).log()).squeeze(-1))
    return torch.logsumexp(torch.stack(lses), dim=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_lse_of_rounded_weights_is_judged_by_what_roundings_do_not_by_one_draw(dtype: torch.dtype) -> None:
    """Other splits round otherwise: all their rows pass. A key left out shows, and no limit passes three roundings of the largest weight."""
    q, k, v, _ = inputs(dtype, new=400, kv=64)
    mask = torch.ones(400, 64, dtype=torch.bool)
    exact = torch.logsumexp(torch.einsum("nhd,khd->nhk", q.double(), k.double().repeat_interleave(2, dim=1)) * 0.2, dim=-1)[..., None]
    lse = softmax_rounded([WEIGHTS_ROUNDED])(q, k, v, mask, 0.2, page_size=16, longest=64)[1]
    limit = limits(absolute_error(lse[..., None], exact).flatten(), torch.zeros(1600))
    for splits in (2, 4, 8):
        error = absolute_error(split_lse(q, k, 0.2, splits)[..., None], exact).flatten()
        assert float((error / limit).max()) <= 1, splits
    short = absolute_error(split_lse(q, k[1:], 0.2, 1)[..., None], exact).flatten()
    assert float((short > limit).float().mean()) > 0.5
    assert float(limit.max()) < FACTOR * torch.finfo(dtype).eps / 2


def test_a_single_key_rounds_no_weight() -> None:
    q, k, v, _ = inputs(torch.bfloat16, kv=1)
    _, lse = softmax_rounded([WEIGHTS_ROUNDED])(q, k, v, torch.ones(5, 1, dtype=torch.bool), 0.2, page_size=16, longest=1)
    _, right = softmax_baseline(q, k, v, torch.ones(5, 1, dtype=torch.bool), 0.2)
    assert torch.equal(lse, right)


EVERY = (
    [], [ROUNDED_AFTER_USE], [ROUNDED_AND_SPLIT], [ROUNDED_AND_SPLIT, WEIGHTS_ADDED], [TF32_PRODUCTS], [WEIGHTS_ROUNDED],
    [WEIGHTS_ROUNDED, TF32_PRODUCTS], [WEIGHTS_ROUNDED, PARTS_ROUNDED, TANH_APPROXIMATED], [ELEMENT_PRODUCTS], [SINK_RESCALE],
)  # fmt: skip


@pytest.mark.parametrize("steps", EVERY, ids=lambda steps: "+".join(steps) or "none")
@pytest.mark.parametrize(("new", "kv"), [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_requests_without_a_token_or_a_key_and_rows_that_see_none(steps: list[str], new: int, kv: int) -> None:
    q, k, v = torch.randn(new, 2, 32).bfloat16(), torch.randn(kv, 2, 32).bfloat16(), torch.randn(kv, 2, 32).bfloat16()
    out, lse = softmax_rounded(steps)(q, k, v, torch.zeros(new, kv, dtype=torch.bool), 0.2, page_size=16, longest=40)
    assert (tuple(out.shape), tuple(lse.shape)) == ((new, 2, 32), (new, 2))
    assert not out.any()
    assert (lse == float("-inf")).all()


def capped_lse(q: torch.Tensor, k: torch.Tensor, cap: float, unit: float) -> torch.Tensor:
    """Float64 LSE under a soft cap whose tanh is off by up to ``unit`` of itself, in a pattern of its own."""
    score = torch.einsum("nhd,khd->nhk", q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)) * 0.2
    tanh = torch.tanh(score / cap)
    return torch.logsumexp(cap * tanh * (1 + unit * torch.sin(1e5 * tanh)), dim=-1)[..., None]


@pytest.mark.parametrize("steps", [[TANH_APPROXIMATED], [WEIGHTS_ROUNDED, TANH_APPROXIMATED]], ids="+".join)
def test_the_lse_under_an_approximated_soft_cap_is_judged_by_what_such_approximations_do(steps: list[str]) -> None:
    """Another approximation of tanh passes, a key left out does not, and without a cap nothing moves."""
    q, k, v, _ = inputs(torch.float16, new=400, kv=64)
    mask = torch.ones(400, 64, dtype=torch.bool)
    exact = capped_lse(q, k, 8.0, 0.0)
    lse = softmax_rounded(steps)(q, k, v, mask, 0.2, page_size=16, longest=64, soft_cap=8.0)[1]
    limit = limits(absolute_error(lse[..., None], exact).flatten(), torch.zeros(1600))
    textbook = softmax_baseline(q, k, v, mask, 0.2, soft_cap=8.0)[1]
    narrow = limits(absolute_error(textbook[..., None], exact).flatten(), torch.zeros(1600))
    error = absolute_error(capped_lse(q, k, 8.0, TANH_UNIT), exact).flatten()
    assert float((error / limit).max()) <= 1 < float((error / narrow).max())
    short = absolute_error(capped_lse(q, k[1:], 8.0, 0.0), exact).flatten()
    assert float((short > limit).float().mean()) > 0.5
    same = softmax_rounded([TANH_APPROXIMATED])(q, k, v, mask, 0.2, page_size=16, longest=64)[1]
    torch.testing.assert_close(same, softmax_baseline(q, k, v, mask, 0.2)[1])


def test_parts_rounded_before_they_are_merged_stray_further_where_one_key_has_the_weight() -> None:
    q, k, v, mask = inputs(torch.bfloat16, new=60)
    k[:] = q[-1:, :2] * torch.linspace(-1, 1, 70)[:, None, None].bfloat16()  # the last key takes most of it
    exact = softmax_baseline(*(t.double() for t in (q, k, v)), mask, 1.0)[0]
    plain, parts = (
        float((softmax_rounded(steps)(q, k, v, mask, 1.0, page_size=16, longest=70)[0] - exact).norm() / exact.norm())
        for steps in ([WEIGHTS_ROUNDED], [WEIGHTS_ROUNDED, PARTS_ROUNDED])
    )
    assert plain < parts < 2 * plain


def test_cut_products_stray_as_far_as_tf32_and_keep_sinks() -> None:
    q, k, v, mask = inputs(torch.float32)
    for sinks in (None, torch.tensor([0.5, -1.0, 2.0, 0.0])):
        exact, exact_lse = softmax_baseline(q, k, v, mask, 0.2, sinks=sinks)
        cut, lse = softmax_rounded([TF32_PRODUCTS])(q, k, v, mask, 0.2, page_size=16, longest=70, sinks=sinks)
        assert 1e-5 < (cut - exact).norm() / exact.norm() < 3e-3
        torch.testing.assert_close(lse, exact_lse, rtol=0, atol=1e-2)


def test_weights_added_one_by_one_stray_further_and_stay_a_sum() -> None:
    q, k, v, mask = inputs(torch.bfloat16, kv=128)
    exact = softmax_baseline(*(t.double() for t in (q, k, v)), mask, 0.2)[0]
    errors = [
        float((softmax_rounded(steps)(q, k, v, mask, 0.2, page_size=128, longest=128)[0] - exact).norm() / exact.norm())
        for steps in ([ROUNDED_AFTER_USE], [ROUNDED_AFTER_USE, WEIGHTS_ADDED])
    ]
    assert 1.5 * errors[0] < errors[1] < 0.1


def test_a_sink_rescales_an_output_rounded_before() -> None:
    q, k, v, mask = inputs(torch.float32)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out, lse = softmax_rounded([SINK_RESCALE])(q, k, v, mask, 0.2, page_size=16, longest=70, sinks=sinks)
    plain, plain_lse = softmax_baseline(q, k, v, mask, 0.2, sinks=sinks)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(lse, plain_lse)


def decay_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(75, 2, 64, generator=generator).to(dtype) for _ in range(3))
    return q, k, v, torch.randn(2, 2, 64, 64, generator=generator), torch.tensor([0.3, 0.01])


@pytest.mark.parametrize("steps", [[], [PARTIAL_SUMS], [CHUNK_OPERANDS]])
def test_chunks_in_float32_are_the_recurrence(steps: list[str]) -> None:
    q, k, v, initial, slopes = decay_inputs(torch.float32)
    found = chunked_decay(steps, q, k, v, initial, slopes, (70, 5), 0.125)
    right = decayed_state_attention(q, k, v, initial, slopes, (70, 5), 0.125)
    torch.testing.assert_close(found.out.double(), right.out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.final.double(), right.final, rtol=1e-4, atol=1e-4)


def test_tf32_products_reach_the_state_and_partial_sums_do_not() -> None:
    q, k, v, initial, slopes = decay_inputs(torch.bfloat16)
    right = decayed_state_attention(q, k, v, initial, slopes, (70, 5), 0.125).final
    errors = {
        step: float((chunked_decay([step], q, k, v, initial, slopes, (70, 5), 0.125).final - right).norm() / right.norm())
        for step in (PARTIAL_SUMS, TF32_PRODUCTS, CHUNK_OPERANDS)
    }
    assert 1e-4 < errors[CHUNK_OPERANDS] < 5e-3
    assert errors[PARTIAL_SUMS] < 1e-6
    assert 1e-5 < errors[TF32_PRODUCTS] < 2e-3


def test_an_unknown_step_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown rounding step 'looser'; known here: .*TF32"):
        softmax_rounded(["looser"])


def test_a_step_is_a_name_without_a_number() -> None:
    for row in (
        find_row("conch", AttentionKind.SOFTMAX),
        find_row("sgl-triton", AttentionKind.SOFTMAX),
        find_row("seg_la", AttentionKind.LIGHTNING),
    ):
        assert isinstance(row.conventions, Conventions)
        for step in row.conventions.rounding:
            assert step.citation
            assert not any(isinstance(value, (int, float)) for value in vars(step).values())
