"""The comparison that every verdict rests on: row by row, NaN never passes, limits from the row's own baseline."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.measure import FACTOR, FLOAT32_UNIT, Measurement, limits, measure, relative_rms
from attnmatrix.harness.registry import find_row


def compare(actual: Tensor, reference: Tensor, baseline: Tensor | None = None, conditioning: Tensor | None = None) -> Measurement:
    baseline = reference * (1 + 1e-3) if baseline is None else baseline
    conditioning = torch.zeros(reference.shape[:-1]) if conditioning is None else conditioning
    return measure("out", 0, 0, ("token", "head"), actual, reference, baseline, conditioning, torch.bfloat16)


def rows(tokens: int = 4, heads: int = 2, dim: int = 8) -> Tensor:
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_error_by_hand() -> None:
    """Reference (3, 4), actual (3, 3): rms of the difference 1/sqrt 2, of the reference 5/sqrt 2."""
    assert relative_rms(torch.tensor([[3.0, 3.0]]), torch.tensor([[3.0, 4.0]])).item() == pytest.approx(0.2, abs=1e-15)


def test_a_zero_reference_is_judged_absolutely() -> None:
    assert relative_rms(torch.tensor([[0.3, 0.4]]), torch.zeros(1, 2)).item() == pytest.approx(0.125**0.5, rel=1e-6)
    assert relative_rms(torch.zeros(1, 2), torch.zeros(1, 2)).item() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("reference", [1.0, 0.0], ids=["nonzero", "zero"])
def test_what_is_not_finite_never_passes(bad: float, reference: float) -> None:
    right = torch.full((4, 2, 8), reference, dtype=torch.float64)
    wrong = right.clone()
    wrong[2, 1, 5] = bad
    for baseline in (right, torch.full_like(right, 1e6), torch.full_like(right, bad)):
        found = compare(wrong, right, baseline)
        assert found.ratio.max() == float("inf")
        assert found.where(found.worst) == "token 2, head 1"


def test_a_reference_that_is_not_finite_never_passes() -> None:
    right = rows()
    right[0, 0, 0] = float("nan")
    assert compare(right.clone(), right).ratio.max() == float("inf")


def test_one_bad_row_among_many_is_seen() -> None:
    """A norm over the whole tensor would show 2e-3 here: under the limit."""
    right = rows(tokens=4096, heads=4, dim=16)
    wrong = right.clone()
    wrong[1234, 3] *= 1.25
    assert (wrong - right).norm() / right.norm() < FACTOR * 1e-3
    found = compare(wrong, right)
    assert int((found.ratio > 1).sum()) == 1
    assert found.where(found.worst) == "token 1234, head 3"


def test_one_bad_element_in_a_row_is_seen() -> None:
    right = rows()
    wrong = right.clone()
    wrong[1, 0, 3] += 0.5
    assert (compare(wrong, right).ratio > 1).tolist() == [False, False, True, False, False, False, False, False]


def test_small_rows_beside_large_ones_are_judged_by_their_own_size() -> None:
    right = rows()
    right[0] *= 1e-6
    wrong = right.clone()
    wrong[0, 0] *= 1.01
    assert (compare(wrong, right).ratio > 1).tolist() == [True, *[False] * 7]


@pytest.mark.parametrize(("off", "passes"), [(0.0029, True), (0.0031, False)])
def test_the_limit_is_three_times_the_baseline(off: float, passes: bool) -> None:
    right = rows()
    found = compare(right * (1 + off), right)
    assert bool((found.ratio <= 1).all()) is passes
    assert found.ratio.max().item() == pytest.approx(off / 3e-3, rel=1e-6)


def test_each_of_three_terms_can_be_the_limit() -> None:
    baseline = torch.tensor([1e-3, 1e-3, 5e-2, 1e-3, 1e-4], dtype=torch.float64)
    conditioning = torch.tensor([0.0, 2**24 * 7e-3, 0.0, 0.0, 0.0], dtype=torch.float64)
    expected = [3e-3, 2.1e-2, 1.5e-1, 3e-3, 3e-3]  # median, conditioning, its own baseline, median, median
    assert limits(baseline, conditioning).tolist() == pytest.approx(expected)
    assert 3 * FLOAT32_UNIT == 3 * 2**-24


@pytest.mark.parametrize("overflowed", [float("inf"), float("nan")], ids=str)
def test_a_baseline_that_overflowed_excuses_nothing(overflowed: float) -> None:
    right = rows()
    baseline = right * (1 + 1e-3)
    baseline[0] = overflowed
    wrong = right.clone()
    wrong[0] *= 1.5
    assert (compare(wrong, right, baseline).ratio > 1).tolist() == [True, True, *[False] * 6]
    assert compare(wrong, right, torch.full_like(right, overflowed)).ratio.max() == float("inf")


@pytest.mark.parametrize("overflowed", [float("inf"), float("nan")], ids=str)
def test_conditioning_that_overflowed_excuses_nothing(overflowed: float) -> None:
    right = rows()
    assert (compare(right * 1.5, right, conditioning=torch.full((4, 2), overflowed)).ratio > 1).all()


def test_a_limit_that_is_not_a_number_passes_nothing() -> None:
    error = torch.tensor([1e-9, float("inf"), float("nan"), float("nan")])
    limit = torch.tensor([float("nan"), float("inf"), 1.0, float("inf")])
    found = Measurement("out", 0, 0, ("token",), (4,), error, error, limit, 0)
    assert (found.ratio == float("inf")).all()


def test_an_exact_result_passes_an_exact_baseline() -> None:
    right = rows()
    assert compare(right.clone(), right, right.clone()).ratio.max() == 0.0
    assert compare(right * (1 + 1e-12), right, right.clone()).ratio.max() == float("inf")


def test_uninformative_rows_are_counted() -> None:
    right = rows()
    baseline = right * (1 + 1e-3)
    baseline[3, 1] = right[3, 1] * 1.03
    assert compare(right, right, baseline).uninformative == 1
    assert compare(right, right).uninformative == 0


def test_nothing_to_compare() -> None:
    found = compare(torch.zeros(0, 2, 8), torch.zeros(0, 2, 8))
    assert found.error.numel() == found.ratio.numel() == 0


def test_low_precision_values_are_compared_in_float64() -> None:
    """Squares of 1e4 in fp16 overflow, those of 1e-5 vanish."""
    for size in (1e4, 1e-5):
        right = torch.full((1, 1, 64), size, dtype=torch.float64)
        assert relative_rms(right.half() * 2, right).item() == pytest.approx(1.0, abs=2e-2)


def test_an_output_near_the_smallest_normal_number_is_no_alarm() -> None:
    """A sink takes all but 2**-127 of the weight: the row's products must not flush what is left to zero."""
    case = parse_case("mixed-p2-prefix3.0.36.179-new1.1.7.22-h8x4x80-bf16-scattered-scratchfirst-sinks-gain16-s4")
    result = run_cell(find_row("torch", AttentionKind.SOFTMAX), RunnerMode.BCG_EXTEND, case, torch.device("cpu"), controls=())
    assert result.status == "pass", (result.reason, *result.details)
