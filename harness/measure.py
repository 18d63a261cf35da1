"""Row-relative errors and their limits: the comparison every verdict rests on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

FACTOR = 3.0
"""Headroom over the baseline; see ``harness/calibration.md`` for the measured ratios behind it."""
FLOAT32_UNIT = 2.0**-24
UNINFORMATIVE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
"""Baseline error above which a row says little: the right answer nearly cancels there."""


@dataclass(frozen=True)
class Measurement:
    """One quantity of one step, row by row (``[rows]``, float64).

    ``quantity`` is ``out``, ``lse``, ``state`` or ``intermediate``; ``labels`` names the axes that ``shape`` gives, so that a
    flat row index can be turned into token, head, slot or key row.
    """

    quantity: str
    step: int
    layer: int
    labels: tuple[str, ...]
    shape: tuple[int, ...]
    error: Tensor
    baseline: Tensor
    limit: Tensor
    uninformative: int

    @cached_property
    def ratio(self) -> Tensor:
        """Error over limit per row; above 1 is wrong, NaN and infinity count as infinite, 0/0 as 0."""
        ratio = torch.where(self.error == 0, 0.0, self.error / self.limit)
        return torch.nan_to_num(ratio, nan=float("inf"), posinf=float("inf"))

    @cached_property
    def worst(self) -> int:
        """Flat index of the row with the largest ratio."""
        return int(self.ratio.argmax())

    def where(self, row: int) -> str:
        """``token 3, head 1`` for a flat row index."""
        parts = []
        for label, extent in zip(reversed(self.labels), reversed(self.shape), strict=True):
            parts.append(f"{label} {row % extent}")
            row //= extent
        return ", ".join(reversed(parts))


def relative_rms(actual: Tensor, reference: Tensor) -> Tensor:
    """``rms(actual - reference) / rms(reference)`` over the last axis in float64; absolute where the reference is zero.

    Anything not finite in ``actual`` makes the row infinite.
    """
    reference = reference.double()
    difference = (actual.double() - reference).square().mean(dim=-1).sqrt()
    size = reference.square().mean(dim=-1).sqrt()
    error = torch.where(size > 0, difference / torch.where(size > 0, size, 1.0), difference)
    return torch.nan_to_num(error, nan=float("inf"), posinf=float("inf"))


def absolute_error(actual: Tensor, reference: Tensor) -> Tensor:
    """``rms(actual - reference)`` over the last axis in float64; 0 where both are the same infinity, infinite where only one is finite."""
    actual, reference = actual.double(), reference.double()
    difference = torch.where(actual == reference, 0.0, actual - reference)
    return torch.nan_to_num(difference.square().mean(dim=-1).sqrt(), nan=float("inf"), posinf=float("inf"))


def limits(baseline: Tensor, conditioning: Tensor) -> Tensor:
    """``FACTOR * max(baseline of the row, median baseline, 2**-24 * conditioning)`` per row.

    A baseline or conditioning that overflowed excuses nothing: it counts as 0.
    """
    baseline, conditioning = (torch.where(torch.isfinite(term), term, 0.0) for term in (baseline, conditioning))
    median = baseline.median() if baseline.numel() else baseline.new_zeros(())
    return FACTOR * torch.maximum(torch.maximum(baseline, median), FLOAT32_UNIT * conditioning)


def measure(
    quantity: str,
    step: int,
    layer: int,
    labels: tuple[str, ...],
    actual: Tensor,
    reference: Tensor,
    baseline: Tensor,
    conditioning: Tensor,
    dtype: torch.dtype,
    absolute: bool = False,
) -> Measurement:
    """Compare ``actual`` with ``reference`` ``[*shape, D]``, given the ``baseline``'s values and ``conditioning`` ``[*shape]``."""
    shape = tuple(reference.shape[:-1])
    error = absolute_error if absolute else relative_rms
    base = error(baseline, reference).flatten()
    return Measurement(
        quantity,
        step,
        layer,
        labels,
        shape,
        error(actual, reference).flatten(),
        base,
        limits(base, conditioning.double().flatten()),
        0 if absolute else int((base > UNINFORMATIVE[dtype]).sum()),
    )
