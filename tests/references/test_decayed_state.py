"""The decayed-state recurrence against numbers worked out by hand, its chunked form and its closed form."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnmatrix.references.decayed_state import DecayedStateResult, decayed_state_attention, decayed_state_sizes

LENS = (7, 0, 1, 12)
SLOPES = torch.tensor([0.5, 0.0625, 1e-5], dtype=torch.float64)


def inputs(lens: tuple[int, ...] = LENS, dim_v: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    total, heads = sum(lens), len(SLOPES)
    shapes = ((total, heads, 4), (total, heads, 4), (total, heads, dim_v), (len(lens), heads, 4, dim_v))
    q, k, v, initial = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v, initial


def run(lens: tuple[int, ...] = LENS, **options: object) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], DecayedStateResult]:
    drawn = inputs(lens)
    return drawn, decayed_state_attention(*drawn, SLOPES, lens, 0.25, **options)  # type: ignore[arg-type]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_two_tokens_by_hand() -> None:
    """One head, K = 2, V = 1, decay 1/2, scale 10, initial state (8, 4).

    Token 1: (8, 4) / 2 + 3 * (1, 0) = (7, 2); out = 10 * (1 * 7 + 1 * 2) = 90.
    Token 2: (7, 2) / 2 + 5 * (0, 2) = (3.5, 11); out = 10 * (2 * 3.5 - 11) = -40.
    """
    q = torch.tensor([[1.0, 1.0], [2.0, -1.0]]).view(2, 1, 2)
    k = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).view(2, 1, 2)
    v = torch.tensor([3.0, 5.0]).view(2, 1, 1)
    initial = torch.tensor([8.0, 4.0]).view(1, 1, 2, 1)
    slopes = torch.tensor([math.log(2.0)], dtype=torch.float64)
    result = decayed_state_attention(q, k, v, initial, slopes, [2], 10.0, keep_tokens=True)
    assert result.out.flatten().tolist() == pytest.approx([90.0, -40.0], abs=1e-12)
    assert result.final.flatten().tolist() == pytest.approx([3.5, 11.0], abs=1e-12)
    assert result.tokens is not None
    assert result.tokens[0].flatten().tolist() == pytest.approx([7.0, 2.0], abs=1e-12)


def test_closed_form() -> None:
    """``o_i = scale * q_i (e^{-s(i+1)} S + sum_{j<=i} e^{-s(i-j)} k_j v_j)``."""
    (q, k, v, initial), result = run()
    start = 0
    for request, new in enumerate(LENS):
        rows = slice(start, start + new)
        start += new
        steps = torch.arange(new, dtype=torch.float64)
        weight = torch.exp(-SLOPES[:, None, None] * (steps[:, None] - steps[None, :])).tril()
        score = torch.einsum("ihk,jhk->hij", q[rows], k[rows]) * weight
        faded = torch.exp(-SLOPES[None, :] * (steps[:, None] + 1))
        out = torch.einsum("hij,jhv->ihv", score, v[rows]) + torch.einsum("ihk,hkv,ih->ihv", q[rows], initial[request], faded)
        close(result.out[rows], out * 0.25)
        tail = torch.exp(-SLOPES[None, :] * (new - 1 - steps[:, None]))
        added = torch.einsum("jh,jhk,jhv->hkv", tail, k[rows], v[rows])
        close(result.final[request], initial[request] * torch.exp(-SLOPES * new)[:, None, None] + added)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunked_form(chunk: int) -> None:
    """A request fed chunk by chunk, each from the state that the last one left."""
    (q, k, v, initial), result = run((12,))
    state, outs = initial, []
    for start in range(0, 12, chunk):
        part = slice(start, start + chunk)
        piece = decayed_state_attention(q[part], k[part], v[part], state, SLOPES, [len(q[part])], 0.25)
        outs.append(piece.out)
        state = piece.final
    close(torch.cat(outs), result.out)
    close(state, result.final)


def test_requests_do_not_touch_each_other() -> None:
    (q, k, v, initial), result = run()
    start = 0
    for request, new in enumerate(LENS):
        rows = slice(start, start + new)
        start += new
        alone = decayed_state_attention(q[rows], k[rows], v[rows], initial[request : request + 1], SLOPES, [new], 0.25)
        close(result.out[rows], alone.out)
        close(result.final[request], alone.final[0])


def test_kept_states_end_in_the_final_one() -> None:
    _, result = run(keep_tokens=True)
    assert result.tokens is not None
    for request, last in ((0, 6), (2, 7), (3, 19)):
        close(result.tokens[last], result.final[request])
    assert run()[1].tokens is None


def test_a_request_without_tokens_keeps_its_state() -> None:
    (_, _, _, initial), result = run()
    assert torch.equal(result.final[1], initial[1])


@pytest.mark.parametrize("lens", [(), (0,), (0, 0)], ids=str)
def test_nothing_to_do(lens: tuple[int, ...]) -> None:
    (_, _, _, initial), result = run(lens)
    assert result.out.shape == (0, 3, 6)
    assert torch.equal(result.final, initial)


def test_inputs_stay_unchanged() -> None:
    drawn, _ = run(trees=[tuple(range(-1, n - 1)) for n in LENS])
    for tensor, fresh in zip(drawn, inputs(), strict=True):
        assert torch.equal(tensor, fresh)


def test_the_state_stays_in_float64_for_low_precision_inputs() -> None:
    q, k, v, initial = (t.bfloat16() for t in inputs())
    narrow = decayed_state_attention(q, k, v, initial, SLOPES.float(), LENS, 0.25)
    wide = decayed_state_attention(q.double(), k.double(), v.double(), initial.double(), SLOPES.float().double(), LENS, 0.25)
    assert narrow.final.dtype is torch.float64
    assert torch.equal(narrow.out, wide.out)
    assert torch.equal(narrow.final, wide.final)


def test_sizes_add_up_what_cancels_and_weigh_the_decay_by_hand() -> None:
    """One head, K = V = 1, decay 1/2, initial state 8, then -6 and 1: terms count in full and once more per decay."""
    q, k, v = (torch.tensor(pair).view(2, 1, 1) for pair in ((1.0, -2.0), (2.0, 1.0), (-3.0, 1.0)))
    initial, slopes = torch.full((1, 1, 1, 1), -8.0), torch.tensor([math.log(2.0)])
    first = 4 * (1 + 1) + 6
    second = 2 * (1 + 2) + 3 * (1 + 1) + 1
    sizes = decayed_state_sizes(q, k, v, initial, slopes, [2], 10.0, keep_tokens=True)
    assert sizes.out.flatten().tolist() == pytest.approx([10 * first, 20 * second], rel=1e-6)
    assert sizes.final.item() == pytest.approx(second, rel=1e-6)
    assert sizes.tokens is not None
    assert sizes.tokens.flatten().tolist() == pytest.approx([first, second], rel=1e-6)
