"""The harness's own quantiser of a KV cache in an 8-bit float: one scale per tensor, round to nearest even, saturating."""

from __future__ import annotations

import torch
from torch import Tensor


def quantise(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``values / scale`` in float32, clamped to the range of ``dtype`` and rounded to it; shape as given. NaN stays NaN.

    The divisor is a tensor: a GPU multiplies by the rounded reciprocal of a Python number, which is another quotient.
    """
    largest = torch.finfo(dtype).max
    wide = values.float()
    return (wide / wide.new_full((), scale)).clamp(-largest, largest).to(dtype)


def dequantise(held: Tensor, scale: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """``held * scale`` in ``dtype`` (float64 or float32)."""
    return held.to(dtype) * scale


def steps_apart(one: Tensor, other: Tensor) -> Tensor:
    """int16: how many representable values lie between two tensors of an 8-bit float, plus one; 0 for equal values, both zeros included.

    Two NaN are 0 apart, NaN and a number further than any two numbers.
    """
    both_nan = one.float().isnan() & other.float().isnan()
    any_nan = one.float().isnan() | other.float().isnan()
    apart = (_rank(one) - _rank(other)).abs()
    return apart.masked_fill(any_nan, torch.iinfo(torch.int16).max).masked_fill(both_nan, 0)


def _rank(tensor: Tensor) -> Tensor:
    """int16: the place of each value among those of its dtype, 0 for both zeros (sign and magnitude, as floats are stored)."""
    stored = tensor.contiguous().view(torch.uint8).short()
    size = stored & 0x7F
    return torch.where(stored >= 0x80, -size, size)
