"""Fences around the memory that a package allocates for itself: out-of-bounds writes become an error, not a crash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnmatrix.harness.pools import CANARY, bits

FENCE_BYTES = 1 << 16  # on each side: more than the rows of one batch that a kernel may address by mistake
_ALLOCATORS = (torch.empty, torch.zeros, torch.empty_like, torch.zeros_like, torch.Tensor.new_empty, torch.Tensor.new_zeros)


class OutOfBoundsWrite(Exception):
    """A kernel wrote before or behind a tensor that its package had allocated."""


class _Fences(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.whole: list[tuple[Tensor, int, tuple[int, ...]]] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        fence = func in _ALLOCATORS and made.is_contiguous() and made.dtype is not torch.bool
        return self._fenced(made) if fence else made

    def _fenced(self, made: Tensor) -> Tensor:
        margin = FENCE_BYTES // made.element_size()
        whole = torch.empty(made.numel() + 2 * margin, dtype=made.dtype, device=made.device)
        bits(whole).fill_(CANARY[whole.element_size()])
        inside = whole[margin : margin + made.numel()].view(made.shape)
        inside.copy_(made)
        self.whole.append((whole, margin, tuple(made.shape)))
        return inside

    def broken(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors beside which something was written."""
        found = []
        for whole, margin, shape in self.whole:
            edges = torch.cat([bits(whole[:margin]), bits(whole[whole.numel() - margin :])])
            if bool((edges != CANARY[whole.element_size()]).any()):
                found.append(shape)
        return found


@contextmanager
def fenced_scratch() -> Iterator[None]:
    """Fence every contiguous tensor that is allocated in the block. Raises OutOfBoundsWrite after it when a fence is damaged.

    Reads the fences back, so not for graph capture.
    """
    with _Fences() as fences:
        yield
    broken = fences.broken()
    if broken:
        raise OutOfBoundsWrite(f"a kernel wrote outside a tensor of shape {broken[0]} that its package allocated")
