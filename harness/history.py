"""What the requests of a story have behind them: the right state, the baseline's and how it is conditioned, from batch to batch.

Each batch of a story is judged by the reference over its whole history, with the error that the baseline makes over the same history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class History:
    """States ``[R, H, K, V]`` of one layer: ``right`` float64, ``base`` the baseline's float32, and the two running parts of
    :func:`attnmatrix.references.decayed_state.decayed_state_sizes`."""

    right: Tensor
    base: Tensor
    plain: Tensor
    weighted: Tensor

    @classmethod
    def fresh(cls, initial: Tensor) -> History:
        """Nothing behind: ``initial`` is what the pool was filled with."""
        size = initial.float().abs()
        return cls(initial.double(), initial.float(), size, torch.zeros_like(size))

    def accepted(self, tokens: History, new_lens: Sequence[int], counts: Sequence[int]) -> History:
        """The history after a verify whose states after each token are ``tokens`` ``[T, ...]``: that of each request's last accepted
        draft token, its own where none was."""
        starts = [sum(new_lens[:request]) for request in range(len(new_lens))]

        def pick(own: Tensor, after: Tensor) -> Tensor:
            chosen = [after[start + count - 1] if count else own[r] for r, (start, count) in enumerate(zip(starts, counts, strict=True))]
            return torch.stack(chosen)

        return History(
            pick(self.right, tokens.right),
            pick(self.base, tokens.base),
            pick(self.plain, tokens.plain),
            pick(self.weighted, tokens.weighted),
        )


class Histories:
    """The histories of a world's story, by layer: what the last batch left and what its first batch snapshot."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, int], History] = {}
        self._snapshots: dict[int, History] = {}

    def before(self, step: int, layer: int, follows: str, initial: Tensor) -> History:
        """What the requests of a step start from; ``initial`` unless they follow another batch's."""
        if follows == "same":
            return self._after[step - 1, layer]
        return self._snapshots[layer] if follows == "resume" else History.fresh(initial)

    def leave(self, step: int, layer: int, history: History) -> None:
        self._after[step, layer] = history
        self._after.pop((step - 2, layer), None)

    def snapshot(self, layer: int, history: History) -> None:
        self._snapshots[layer] = history
