"""ALiBi slopes, and the per-layer decay rates that Lightning attention derives from them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(heads: int) -> Tensor:
    """float64 ``[heads]``: the slopes of Press et al. 2021 (ALiBi), section 3 and its released code for other counts.

    For a power of two n they are ``start ** (i + 1)`` with ``start = 2 ** -(2 ** -(log2(n) - 3))``. Otherwise those of
    the closest lower power of two, followed by every second slope of twice that number.
    """
    lower = 2 ** int(math.log2(heads))
    slopes = _power_of_two_slopes(lower)
    if lower < heads:
        slopes += _power_of_two_slopes(2 * lower)[0::2][: heads - lower]
    return torch.tensor(slopes, dtype=torch.float64)


def _power_of_two_slopes(heads: int) -> list[float]:
    start = 2.0 ** -(2.0 ** -(math.log2(heads) - 3))
    return [start ** (index + 1) for index in range(heads)]


def lightning_slopes(heads: int, layer: int, num_layers: int) -> Tensor:
    """float64 ``[heads]``: decay rates of one layer; a token multiplies the state by ``exp(-slope)``.

    MiniMax-01's layer rule: ALiBi's slopes times ``1 - layer / (num_layers - 1) + 1e-5``, ``1 + 1e-5`` for one layer.
    """
    fraction = layer / (num_layers - 1) if num_layers > 1 else 0.0
    return alibi_slopes(heads) * (1 - fraction + 1e-5)
