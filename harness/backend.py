"""The backend contract: five methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch
    from attnmatrix.harness.context import Context


class AttentionBackend(ABC):
    """One attention backend over the pools of ``context``.

    New keys and values (or state updates) are written first, then read: a step's queries see the step's keys.
    """

    def __init__(self, context: Context) -> None:
        self.context = context

    @abstractmethod
    def prepare_metadata(self, batch: Batch) -> None:
        """Turn the batch into what the kernels need, for all layers; sets ``batch.attn_metadata``.

        Several batches may be prepared before the first of them runs.
        """

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        """Write ``k``, ``v`` ``[T, Hkv, D]`` at ``batch.out_loc`` and return attention of ``q`` ``[T, Hq, D]``: ``[T, Hq, D]``.

        Inputs may be strided views and stay unchanged.
        """

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        """Allocate the static buffers for graphs of these padded batch sizes."""
        raise NotImplementedError(f"{type(self).__name__} captures no graphs")

    def prepare_for_capture(self, batch: Batch) -> None:
        """Set ``batch.attn_metadata`` to static buffers of ``batch.padded_reqs`` rows; called before capture."""
        raise NotImplementedError(f"{type(self).__name__} captures no graphs")

    def prepare_for_replay(self, batch: Batch) -> None:
        """Copy what ``prepare_metadata`` built for ``batch`` into the buffers captured for its padded size."""
        raise NotImplementedError(f"{type(self).__name__} captures no graphs")

    def forward_with_lse(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Like :meth:`forward`, with the log-sum-exp float32 ``[T, Hq]`` in the declared base, sinks included; optional."""
        raise NotImplementedError(f"{type(self).__name__} returns no LSE")

    @property
    def returns_lse(self) -> bool:
        """Whether :meth:`forward_with_lse` is there to be judged."""
        return type(self).forward_with_lse is not AttentionBackend.forward_with_lse

    def commit(self, accepted: Tensor, batch: Batch) -> None:
        """After the target_verify ``batch``: make the state of each request's last accepted draft token its live state in every layer.

        ``accepted`` int64 ``[R]``, 0 leaves the live state. Engines do this on the pools; a backend may bring its own.
        """
        from attnmatrix.harness.commit import commit_states

        assert self.context.states is not None
        commit_states(self.context.states, self.context.num_layers, batch, accepted)

    def inspect_metadata(self, batch: Batch) -> PreparedMetadata | None:
        """What was prepared, for checks that outputs cannot make; optional."""
        return None


@dataclass(frozen=True)
class PreparedMetadata:
    """Prepared metadata in common terms; a field that the backend does not have stays None.

    ``cache_seqlens`` count prefix and new tokens in every mode. In graph modes these are the captured buffers.
    """

    cu_seqlens_q: Tensor | None = None  # [R + 1]
    cu_seqlens_k: Tensor | None = None  # [R + 1]
    cache_seqlens: Tensor | None = None  # [R]
    page_table: Tensor | None = None  # [R, pages]
    kv_indptr: Tensor | None = None  # [R + 1]
    kv_indices: Tensor | None = None  # [pages or tokens]
    last_indices: Tensor | None = None  # [R]
    positions: Tensor | None = None  # [T]
    extra: Any = None
