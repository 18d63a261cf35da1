"""The harness's quantiser against a table of fp8's values that is made from the format's definition."""

from __future__ import annotations

import math
from bisect import bisect
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from attnmatrix.harness.quantise import dequantise, quantise, steps_apart

FP8 = torch.float8_e4m3fn


def value(code: int) -> float:
    """E4M3FN (arXiv 2209.05433, table 1): bias 7, 3 bits of mantissa, no infinity, the largest code of either sign NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    return sign * (2.0**-9 * mantissa if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))


CODES = [code for code in range(256) if code & 0x7F != 0x7F]
TABLE = sorted((value(code), code) for code in CODES if code != 0x80)


def nearest(exact: Fraction) -> float:
    """The value of fp8 next to ``exact``, of two the one whose mantissa is even."""
    above = bisect(TABLE, exact, key=lambda entry: entry[0])
    beside = TABLE[max(above - 1, 0) : above + 1]
    return min(beside, key=lambda entry: (abs(Fraction(entry[0]) - exact), entry[1] & 1))[0]


def as_codes(codes: list[int]) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.uint8).view(FP8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [0.37, 1.9, 0.0083, 1.0])
def test_the_nearest_value_is_taken(scale: float, dtype: torch.dtype) -> None:
    drawn = torch.randn(300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 300)
    ties = torch.tensor([scale * (a + b) / 2 for (a, _), (b, _) in pairwise(TABLE)])
    given = torch.cat([drawn, ties, torch.tensor([0.0, 448 * scale, 1e4, -1e4])]).to(dtype)
    quotients = (given.double() / torch.tensor(scale).double()).float()  # as rounded once: 53 bits are more than twice 24 and 2
    assert quantise(given, scale, FP8).float().tolist() == [nearest(Fraction(quotient)) for quotient in quotients.tolist()]


def test_nothing_becomes_nan_but_nan() -> None:
    given = torch.tensor([math.nan, math.inf, -math.inf, 3e38])
    assert quantise(given, 0.0083, FP8).float().tolist()[1:] == [448.0, -448.0, 448.0]
    assert quantise(given, 0.0083, FP8).float()[0].isnan()


def test_what_is_read_is_the_exact_product() -> None:
    held = as_codes(CODES)
    read = dequantise(held, 0.37)
    assert read.dtype is torch.float64
    assert read.tolist() == [value(code) * 0.37 for code in CODES]


def test_a_value_read_and_quantised_again_is_the_same() -> None:
    held = as_codes(CODES)
    for scale in (0.37, 1.9, 0.0083):
        again = quantise(dequantise(held, scale), scale, FP8)
        assert steps_apart(again, held).max() == 0


def test_steps_count_the_values_between() -> None:
    order = as_codes([code for _, code in TABLE])
    for distance in (0, 1, 2, 5):
        apart = steps_apart(order[distance:], order[: len(order) - distance])
        assert apart.unique().tolist() == [distance]
    assert steps_apart(as_codes([0x00]), as_codes([0x80])).item() == 0


@pytest.mark.parametrize("number", [0x7E, 0xFE, 0x00])
@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_nan_is_no_neighbour(nan: int, number: int) -> None:
    assert steps_apart(as_codes([nan]), as_codes([number])).item() > 1000
    assert steps_apart(as_codes([number]), as_codes([nan])).item() > 1000
    assert steps_apart(as_codes([nan]), as_codes([0x7F])).item() == 0
