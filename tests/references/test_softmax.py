"""The softmax reference against numbers worked out by hand and against torch's own attention in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnmatrix.cases.case import Case, ForwardMode, Heads
from attnmatrix.references.softmax import softmax_attention
from attnmatrix.references.visibility import key_positions, query_positions, visible_keys

CASE = Case(ForwardMode.EXTEND, 16, (6, 0), (4, 5), Heads(6, 2, 8))
SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0, 2.0, 0.0], dtype=torch.float64)


def column(*numbers: float) -> Tensor:
    """One head of dim 1: ``[n, 1, 1]``."""
    return torch.tensor(numbers, dtype=torch.float64).view(-1, 1, 1)


def qkv(prefix: int, new: int, heads: Heads, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((new, heads.q), (prefix + new, heads.kv), (prefix + new, heads.kv))
    q, k, v = (torch.randn(*shape, heads.dim, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def by_torch(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """torch's attention, query head h on key/value head ``h // group``; ``bias`` is added to the scores."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    out = scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=bias, scale=scale)
    return out.transpose(0, 1)


def test_two_keys_by_hand() -> None:
    """Scores ln 3 and 0: weights 3/4 and 1/4."""
    q, k, v = column(1.0), column(math.log(3.0) / 2, 0.0), column(8.0, 4.0)
    result = softmax_attention(q, k, v, torch.ones(1, 2, dtype=torch.bool), 2.0)
    assert result.out.item() == pytest.approx(7.0, abs=1e-14)
    assert result.lse.item() == pytest.approx(math.log(4.0), abs=1e-14)
    assert result.conditioning.item() == pytest.approx(math.log(3.0), abs=1e-14)


def test_a_hidden_key_counts_for_nothing() -> None:
    q, k, v = column(1.0), column(0.5, -90.0, 0.5), column(8.0, 1e6, 4.0)
    result = softmax_attention(q, k, v, torch.tensor([[True, False, True]]), 1.0)
    assert result.out.item() == pytest.approx(6.0, abs=1e-14)
    assert result.lse.item() == pytest.approx(0.5 + math.log(2.0), abs=1e-14)
    assert result.conditioning.item() == 0.5


def test_a_sink_is_one_more_logit_by_hand() -> None:
    """Weights 3 and 1 and a sink of ln 4: out = (3 * 8 + 1 * 4) / 8."""
    q, k, v = column(1.0), column(math.log(3.0), 0.0), column(8.0, 4.0)
    sinks = torch.tensor([math.log(4.0)], dtype=torch.float64)
    result = softmax_attention(q, k, v, torch.ones(1, 2, dtype=torch.bool), 1.0, sinks=sinks)
    assert result.out.item() == pytest.approx(3.5, abs=1e-14)
    assert result.lse.item() == pytest.approx(math.log(8.0), abs=1e-14)


def test_each_head_has_its_own_sink() -> None:
    q, k, v = torch.zeros(1, 2, 1), torch.zeros(1, 2, 1), torch.full((1, 2, 1), 6.0)
    sinks = torch.tensor([0.0, math.log(2.0)], dtype=torch.float64)
    out = softmax_attention(q, k, v, torch.ones(1, 1, dtype=torch.bool), 1.0, sinks=sinks).out
    assert out.flatten().tolist() == pytest.approx([3.0, 2.0], abs=1e-12)


def test_soft_cap_by_hand() -> None:
    """Scores 4 and -2 capped at 2: 2 tanh(2) and 2 tanh(-1)."""
    q, k, v = column(1.0), column(4.0, -2.0), column(1.0, 0.0)
    result = softmax_attention(q, k, v, torch.ones(1, 2, dtype=torch.bool), 1.0, soft_cap=2.0)
    high, low = 2 * math.tanh(2.0), 2 * math.tanh(-1.0)
    assert result.out.item() == pytest.approx(1 / (1 + math.exp(low - high)), abs=1e-14)
    assert result.conditioning.item() == 4.0 + 2.0


def test_tanh_from_an_exponential_in_float32_errs_by_the_cap_and_within_the_conditioning() -> None:
    """Small scores under a cap of 50: the error stays what the cap makes it, far above what the score alone would explain."""
    q, k = (torch.randn(64, 1, 16, generator=torch.Generator().manual_seed(seed)) * 0.05 for seed in (0, 1))
    seen = torch.eye(64, dtype=torch.bool)  # the LSE of one key is its score
    right = softmax_attention(q, k, k, seen, 0.25, soft_cap=50.0)
    x = torch.einsum("nhd,nhd->nh", q, k) * 0.25 / 50.0
    error = float((50.0 * (2.0 / (1.0 + torch.exp(-2.0 * x)) - 1.0) - right.lse).abs().max())
    assert 1e-6 < error < 2.0**-24 * 3 * float(right.conditioning.min())
    assert error > 2.0**-24 * 100 * float(right.lse.abs().max())


def test_alibi_by_hand() -> None:
    """Equal scores, slope ln 2, distances 2, 1, 0: weights 1/4, 1/2, 1 over 7/4."""
    q, k, v = column(0.0), column(0.0, 0.0, 0.0), column(4.0, 2.0, 1.0)
    result = softmax_attention(
        q,
        k,
        v,
        torch.ones(1, 3, dtype=torch.bool),
        1.0,
        alibi_slopes=torch.tensor([math.log(2.0)], dtype=torch.float64),
        query_positions=torch.tensor([2]),
        key_positions=torch.tensor([0, 1, 2]),
    )
    assert result.out.item() == pytest.approx((1.0 + 1.0 + 1.0) / 1.75, abs=1e-14)


def test_conditioning_adds_up_what_cancels_in_the_score() -> None:
    """``q . k = 3 - 3``, scale 2: the score is 0, its terms add up to 12; the hidden key has larger ones; ALiBi adds 5."""
    q, k = torch.tensor([1.0, 1.0]).view(1, 1, 2), torch.tensor([[3.0, -3.0], [50.0, 50.0]]).view(2, 1, 2)
    at, keys = torch.tensor([6]), torch.tensor([1, 6])
    mask = torch.tensor([[True, False]])
    plain = softmax_attention(q, k, k, mask, 2.0)
    biased = softmax_attention(q, k, k, mask, 2.0, alibi_slopes=torch.ones(1), query_positions=at, key_positions=keys)
    assert (plain.lse.item(), plain.conditioning.item()) == (0.0, 12.0)
    assert (biased.lse.item(), biased.conditioning.item()) == (-5.0, 17.0)


def test_a_row_without_keys_is_zero() -> None:
    q, k, v = column(1.0, 1.0), column(2.0), column(7.0)
    result = softmax_attention(q, k, v, torch.tensor([[False], [True]]), 1.0)
    assert result.out.flatten().tolist() == [0.0, 7.0]
    assert result.lse.flatten().tolist() == [-math.inf, 2.0]
    assert result.conditioning.flatten().tolist() == [0.0, 2.0]


def test_a_row_without_keys_but_with_a_sink() -> None:
    sinks = torch.tensor([1.5], dtype=torch.float64)
    hidden = softmax_attention(column(1.0), column(2.0), column(7.0), torch.tensor([[False]]), 1.0, sinks=sinks)
    none = softmax_attention(column(1.0), column(), column(), torch.zeros(1, 0, dtype=torch.bool), 1.0, sinks=sinks)
    for result in (hidden, none):
        assert (result.out.item(), result.lse.item(), result.conditioning.item()) == (0.0, 1.5, 0.0)


@pytest.mark.parametrize(("new", "kv"), [(0, 0), (0, 3), (2, 0)])
def test_zero_lengths(new: int, kv: int) -> None:
    q, k, v = torch.ones(new, 4, 8), torch.ones(kv, 2, 8), torch.ones(kv, 2, 8)
    result = softmax_attention(q, k, v, torch.ones(new, kv, dtype=torch.bool), 1.0)
    assert result.out.shape == (new, 4, 8)
    assert not result.out.any()
    assert (result.lse == -math.inf).all()


def test_gqa_maps_query_head_h_to_h_divided_by_the_group() -> None:
    """Two key/value heads with values 10 and 20: query heads 0-2 read the first, 3-5 the second."""
    q, k = torch.zeros(1, 6, 1), torch.zeros(1, 2, 1)
    v = torch.tensor([10.0, 20.0]).view(1, 2, 1)
    out = softmax_attention(q, k, v, torch.ones(1, 1, dtype=torch.bool), 1.0).out
    assert out.flatten().tolist() == [10.0, 10.0, 10.0, 20.0, 20.0, 20.0]


@pytest.mark.parametrize("window", [None, 1, 3, 7], ids=lambda window: f"window{window}")
@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("request_index", [0, 1], ids=["prefix", "no_prefix"])
def test_against_torch(request_index: int, alibi: bool, window: int | None) -> None:
    case = CASE.but(window=window)
    prefix, new = case.prefix_lens[request_index], case.new_lens[request_index]
    q, k, v = qkv(prefix, new, case.heads)
    rows, columns = torch.arange(new)[:, None] + prefix, torch.arange(prefix + new)[None, :]
    hidden = columns > rows if window is None else (columns > rows) | (columns <= rows - window)
    bias = (columns - rows) * (SLOPES[:, None, None] if alibi else 0.0)
    bias = bias.double().expand(6, new, prefix + new).masked_fill(hidden, -math.inf)
    result = softmax_attention(
        q,
        k,
        v,
        visible_keys(case, request_index, 0),
        0.3,
        alibi_slopes=SLOPES if alibi else None,
        query_positions=query_positions(case, request_index),
        key_positions=key_positions(case, request_index),
    )
    torch.testing.assert_close(result.out, by_torch(q, k, v, bias, 0.3), rtol=1e-12, atol=1e-12)
    score = torch.einsum("nhd,khd->hnk", q, k.repeat_interleave(3, dim=1)) * 0.3 + bias
    torch.testing.assert_close(result.lse, torch.logsumexp(score, dim=-1).T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [Heads(4, 4, 16), Heads(7, 1, 16), Heads(8, 2, 16)], ids=str)
def test_gqa_against_torch(heads: Heads) -> None:
    case = CASE.but(heads=heads)
    q, k, v = qkv(6, 4, heads, seed=3)
    bias = torch.zeros(4, 10, dtype=torch.float64).masked_fill(torch.ones(4, 10).triu(7).bool(), -math.inf)
    result = softmax_attention(q, k, v, visible_keys(case, 0, 0), 0.25)
    torch.testing.assert_close(result.out, by_torch(q, k, v, bias, 0.25), rtol=1e-12, atol=1e-12)


def test_sinks_against_torch_with_an_appended_key() -> None:
    """A sink as one more key of score ``sink`` and value zero."""
    q, k, v = qkv(6, 4, CASE.heads, seed=5)
    sinks = torch.linspace(-2, 3, 6, dtype=torch.float64)
    causal = torch.zeros(4, 10, dtype=torch.float64).masked_fill(torch.ones(4, 10).triu(7).bool(), -math.inf)
    bias = torch.cat([causal.expand(6, 4, 10), sinks.view(6, 1, 1).expand(6, 4, 1)], dim=-1)
    nothing = torch.zeros(1, 2, 8, dtype=torch.float64)
    expected = by_torch(q, torch.cat([k, nothing]), torch.cat([v, nothing]), bias, 0.3)
    result = softmax_attention(q, k, v, visible_keys(CASE, 0, 0), 0.3, sinks=sinks)
    torch.testing.assert_close(result.out, expected, rtol=1e-12, atol=1e-12)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = column(1.0), column(5000.0, 4999.0, -5000.0), column(1.0, 0.0, 0.0)
    result = softmax_attention(q, k, v, torch.ones(1, 3, dtype=torch.bool), 1.0)
    assert result.out.item() == pytest.approx(1 / (1 + math.exp(-1.0)), abs=1e-12)


def test_low_precision_inputs_are_widened_first() -> None:
    q, k, v = (t.bfloat16() for t in qkv(6, 4, CASE.heads))
    mask = visible_keys(CASE, 0, 0)
    narrow, wide = softmax_attention(q, k, v, mask, 0.3), softmax_attention(q.double(), k.double(), v.double(), mask, 0.3)
    assert narrow.out.dtype is torch.float64
    assert torch.equal(narrow.out, wide.out)
