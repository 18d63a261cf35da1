"""What a backend is given for one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from attnmatrix.cases.case import ForwardMode
from attnmatrix.cases.options import Tree

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """The draft tokens of a target_verify batch.

    ``trees`` (host): parent of each draft token per row, -1 for a child of the last cached token. ``ancestors`` (device):
    bool ``[T, widest]``, True where a draft token may see the j-th draft token of its own request, itself included.
    ``kind``: ``eagle``, ``frozen_kv_mtp``, ``dflash``, ``ngram`` or None.
    """

    trees: tuple[Tree, ...]
    ancestors: Tensor
    kind: str | None

    @property
    def is_chain(self) -> bool:
        """Whether every row is a chain (topk 1), so that a causal mask says the same."""
        return all(tree == tuple(range(-1, len(tree) - 1)) for tree in self.trees)


@dataclass
class Batch:
    """One batch. Rows ``size .. padded_reqs`` are padding: their lengths, request ids and positions mean nothing, their
    ``out_loc`` is in the scratch page, their state slot is -1 and their output is never read.

    Build metadata from all ``padded_reqs`` rows. T is the number of tokens, padded ones included.
    """

    forward_mode: ForwardMode
    size: int  # live requests
    padded_reqs: int  # rows of every per-request field
    prefix_lens: tuple[int, ...]  # on cpu; cached tokens
    new_lens: tuple[int, ...]  # on cpu; tokens computed now
    kv_lens: tuple[int, ...]  # on cpu; prefix + new
    seq_lens: Tensor  # on gpu; int32 [R]; total length, prefix only in target_verify and draft_extend_v2
    req_pool_indices: Tensor  # on gpu; int64 [R]; row of req_to_token
    out_loc: Tensor  # on gpu; int64 [T]; slot that each new token is written to
    positions: Tensor  # on gpu; int64 [T]
    cu_seqlens_q: Tensor  # on gpu; int32 [R + 1]
    state_indices: Tensor | None = None  # on gpu; int32 [R]; slot in the state pool, -1 touches nothing (linear kinds)
    drafts: DraftTree | None = None  # target_verify only
    track_lens: Tensor | None = None  # on gpu; int32 [R]; new tokens after which the state is snapshot, 0: not at all (linear kinds)
    track_state_indices: Tensor | None = None  # on gpu; int32 [R]; slot in the state pool that takes the snapshot, -1: none
    attn_metadata: Any = field(default=None, repr=False)  # set by prepare_metadata

    @property
    def num_tokens(self) -> int:
        return int(self.out_loc.shape[0])

    def changes(self, fresh: Batch) -> list[str]:
        """One line for each field that differs from ``fresh``, this batch as it was given; ``attn_metadata`` is the backend's."""
        names = [f.name for f in fields(self) if f.name not in ("attn_metadata", "drafts")]
        pairs = [(name, getattr(self, name), getattr(fresh, name)) for name in names]
        if self.drafts is not None and fresh.drafts is not None:
            pairs.append(("drafts.ancestors", self.drafts.ancestors, fresh.drafts.ancestors))
        return [f"batch.{name} was modified" for name, now, before in pairs if not _same(now, before)]


def _same(one: Any, other: Any) -> bool:
    """Equal values, and for tensors equal shape and dtype."""
    if not hasattr(one, "shape") or not hasattr(other, "shape"):
        return bool(one == other)
    return bool(one.shape == other.shape and one.dtype == other.dtype and (one == other).all())
