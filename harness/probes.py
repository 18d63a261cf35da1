"""The inputs that a case is run with: what fills queries, keys, values, and the slots that nobody may read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Poison(str, Enum):
    """What lies in every slot outside the live set."""

    BIG_VALUES = "big_values"  # K = 0 scores like an average key, V = 1e4 shows at once
    RANDOM = "random"  # large random K and V


@dataclass(frozen=True)
class Probe:
    """Inputs of one kind under one fill of the dead slots."""

    name: str
    poison: Poison = Poison.BIG_VALUES


PEAKED = Probe("peaked")


def fill_keys(poison: Poison, tensor: Tensor, generator: torch.Generator) -> None:
    """Overwrite a key buffer (any shape) with poison."""
    if poison is Poison.BIG_VALUES:
        tensor.zero_()
    else:
        _fill_random(tensor, generator, 8.0)


def fill_values(poison: Poison, tensor: Tensor, generator: torch.Generator) -> None:
    """Overwrite a value buffer (any shape) with poison."""
    if poison is Poison.BIG_VALUES:
        tensor.fill_(min(1e4, torch.finfo(tensor.dtype).max / 4))
    else:
        _fill_random(tensor, generator, 100.0)


def fill_states(tensor: Tensor, generator: torch.Generator) -> None:
    """Overwrite a state buffer with stale finite states of unit scale: what another request left behind."""
    _fill_random(tensor, generator, 1.0)


def _fill_random(tensor: Tensor, generator: torch.Generator, scale: float) -> None:
    noise = torch.randn(tensor.shape, generator=generator) * scale
    limit = torch.finfo(tensor.dtype).max / 4
    tensor.copy_(noise.clamp(-limit, limit).to(tensor.dtype))


def peaked(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random normals whose rows differ in size by up to 4, so that scores spread: float32 ``shape`` on the CPU."""
    rows = torch.rand(*shape[:-1], 1, generator=generator)
    return torch.randn(*shape, generator=generator) * (0.5 + 1.5 * rows)
