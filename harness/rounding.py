"""Roundings that a kernel performs beyond the textbook sequence: names that a row states, none of which takes a number.

Their models are in :mod:`attnmatrix.harness.softmax_rounding` and :mod:`attnmatrix.harness.decay_rounding`; steps of one model alone are
named in :mod:`attnmatrix.harness.flash_rounding`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

PARTIAL_SUMS = "partial sums of 32 key dims in the input dtype"
WIDE_PARTIAL_SUMS = "partial sums of 128 key dims in the input dtype"
TF32_PRODUCTS = "products of factors cut to TF32"
CHUNK_OPERANDS = "state read by a chunk of 64, decayed scores and decayed values in the input dtype"
SINK_RESCALE = "output rounded once before the sink rescales it"
ROUNDED_AFTER_USE = "running sum and output in the input dtype, the running maximum rounded after its use"
ROUNDED_AND_SPLIT = "scores, running state and results of splits in the input dtype"
WEIGHTS_ADDED = "weights of a page added one by one in the input dtype"
ELEMENT_PRODUCTS = "products of a query's and a key's elements in the input dtype"
WEIGHTS_ROUNDED = "weights rounded to the input dtype before they are summed"

_TF32_CUT = -(1 << 13)  # mask that leaves 10 of float32's 23 mantissa bits, as tensor cores read a float32 operand


def exact(tensor: Tensor) -> Tensor:
    """The tensor as it is."""
    return tensor


def tf32(tensor: Tensor) -> Tensor:
    """float32 with the mantissa bits that TF32 lacks cut off."""
    return (tensor.float().contiguous().view(torch.int32) & _TF32_CUT).view(torch.float32)


def check_known(steps: Collection[str], known: Sequence[str]) -> None:
    """Raise ValueError for the first step that is not ``known``."""
    unknown = [step for step in steps if step not in known]
    if unknown:
        raise ValueError(f"unknown rounding step {unknown[0]!r}; known here: {', '.join(known)}")
