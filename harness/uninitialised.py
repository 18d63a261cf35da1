"""Memory that a backend allocates and does not write must not look right by luck."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def nan_in_new_tensors() -> Iterator[None]:
    """Within the block ``torch.empty`` returns NaN (the largest value for integers): torch's own debugging aid for
    ``fill_uninitialized_memory``, without the rest of the deterministic mode raising."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # its attributes are made at run time
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fill
