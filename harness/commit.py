"""After a verify: the state of each request's last accepted draft token becomes its live state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnmatrix.harness.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch
    from attnmatrix.harness.pools import StatePool


def commit_states(states: StatePool, layers: int, batch: Batch, accepted: Tensor) -> None:
    """Copy ``intermediate(layer)[row, accepted[row] - 1]`` to the row's state slot in every layer, as engines do between two batches.

    ``accepted`` int64 ``[R]``: draft tokens accepted, 0 leaves the live state as it is.
    """
    assert batch.state_indices is not None
    rows = torch.arange(batch.size, device=accepted.device)
    taken = rows[(accepted[: batch.size] > 0) & (batch.state_indices[: batch.size] >= 0)]
    slots, last = batch.state_indices[taken].long(), accepted[taken] - 1
    for layer in range(layers):
        states.state(layer)[slots] = states.intermediate(layer)[taken, last].to(states.dtype)
