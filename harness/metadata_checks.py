"""What a row prepared, held against the batch: faults that an output shows late or never."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.context import Context


class InspectedBackend(AttentionBackend):
    """A backend whose metadata is read back right before it is used; the runner does not notice.

    Eager: before layer 0, when all batches of the schedule have been prepared. Graphs: after ``prepare_for_capture`` and
    ``prepare_for_replay``, where ``inspect_metadata`` should show the captured buffers.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        super().__init__(inner.context)
        self.inner = inner
        self._captured: dict[int, Batch] = {}  # holds them, lest an id is given to another batch
        self._problems: list[str] = []

    def take_problems(self) -> tuple[str, ...]:
        """One line for each problem found since the last call."""
        problems, self._problems = tuple(dict.fromkeys(self._problems)), []
        return problems

    def _inspect(self, batch: Batch, live: int) -> None:
        prepared = self.inner.inspect_metadata(batch) if batch.padded_reqs else None
        if prepared is not None:
            self._problems += metadata_problems(prepared, batch, self.context, live)

    def prepare_metadata(self, batch: Batch) -> None:
        self.inner.prepare_metadata(batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        if layer_id == 0 and id(batch) not in self._captured:
            self._inspect(batch, batch.size)
        return self.inner.forward(q, k, v, layer_id, batch)

    def forward_with_lse(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> tuple[Tensor, Tensor]:
        if layer_id == 0 and id(batch) not in self._captured:
            self._inspect(batch, batch.size)
        return self.inner.forward_with_lse(q, k, v, layer_id, batch)

    @property
    def returns_lse(self) -> bool:
        return self.inner.returns_lse

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        self.inner.init_capture_graph(max_seq_len, batch_sizes)

    def prepare_for_capture(self, batch: Batch) -> None:
        self.inner.prepare_for_capture(batch)
        self._captured[id(batch)] = batch
        self._inspect(batch, 0)

    def prepare_for_replay(self, batch: Batch) -> None:
        self.inner.prepare_for_replay(batch)
        self._inspect(batch, batch.size)

    def commit(self, accepted: Tensor, batch: Batch) -> None:
        self.inner.commit(accepted, batch)

    def inspect_metadata(self, batch: Batch) -> PreparedMetadata | None:
        return self.inner.inspect_metadata(batch)


def metadata_problems(prepared: PreparedMetadata, batch: Batch, context: Context, live: int) -> list[str]:
    """One line for each field that is not what the batch asks for. The first ``live`` requests are held against the batch, padded rows
    must stay within the tables and the pool only."""
    return [
        *_starts("cu_seqlens_q", prepared.cu_seqlens_q, batch.new_lens[:live]),
        *_starts("cu_seqlens_k", prepared.cu_seqlens_k, batch.kv_lens[:live]),
        *_lengths(prepared, batch, context, live),
        *_table(prepared.page_table, batch, context, live),
        *_indices(prepared, batch, context, live),
        *_last_indices(prepared.last_indices, batch, live),
        *_positions(prepared.positions, batch, live),
    ]


def _starts(name: str, starts: Tensor | None, lens: Sequence[int]) -> list[str]:
    if starts is None:
        return []
    found = starts.tolist()
    if any(later < earlier for earlier, later in pairwise(found)):
        return [f"{name} decreases: {found}"]
    wanted = torch.tensor([0, *lens]).cumsum(0).tolist()
    return [] if found[: len(wanted)] == wanted or not lens else [f"{name} is {found[: len(wanted)]}, expected {wanted}"]


def _lengths(prepared: PreparedMetadata, batch: Batch, context: Context, live: int) -> list[str]:
    if prepared.cache_seqlens is None:
        return []
    found = prepared.cache_seqlens.tolist()
    room = context.max_seq_len if prepared.page_table is None else prepared.page_table.shape[1] * context.page_size
    problems = [f"cache_seqlens has a negative length: {found}"] if min(found, default=0) < 0 else []
    if max(found, default=0) > room:
        problems.append(f"cache_seqlens {found} exceeds the {room} keys that a table row holds")
    wanted = list(batch.kv_lens[:live])
    return problems + ([f"cache_seqlens is {found[:live]}, expected {wanted}"] if found[:live] != wanted else [])


def _pages(batch: Batch, context: Context, row: int) -> list[int]:
    """The physical pages of one request."""
    slots = context.req_to_token[batch.req_pool_indices[row], : batch.kv_lens[row] : context.page_size]
    return [slot // context.page_size for slot in slots.tolist()]


def _table(table: Tensor | None, batch: Batch, context: Context, live: int) -> list[str]:
    if table is None or context.kv is None:
        return []
    if table.numel() and not -1 <= int(table.min()) <= int(table.max()) < context.kv.num_pages:
        return [f"page_table has pages {int(table.min())} to {int(table.max())}, the pool has {context.kv.num_pages}"]
    for row in range(live):
        wanted = _pages(batch, context, row)
        found = table[row, : len(wanted)].tolist()
        if batch.new_lens[row] and found != wanted:
            return [f"page_table row {row} is {found}, expected {wanted}"]
    return []


def _indices(prepared: PreparedMetadata, batch: Batch, context: Context, live: int) -> list[str]:
    """CSR form: each request's entries are its pages, or the slots of its tokens."""
    if prepared.kv_indptr is None:
        return []
    indptr = prepared.kv_indptr.tolist()
    if any(later < earlier for earlier, later in pairwise(indptr)):
        return [f"kv_indptr decreases: {indptr}"]
    for row in range(live):
        slots = context.req_to_token[batch.req_pool_indices[row], : batch.kv_lens[row]].tolist()
        wanted = [_pages(batch, context, row), slots]
        count = indptr[row + 1] - indptr[row]
        if count not in map(len, wanted):
            return [f"kv_indptr gives request {row} {count} entries, expected {len(wanted[0])} pages or {len(slots)} tokens"]
        if prepared.kv_indices is not None and prepared.kv_indices[indptr[row] : indptr[row + 1]].tolist() not in wanted:
            return [f"kv_indices of request {row} are neither its pages nor its slots"]
    return []


def _last_indices(found: Tensor | None, batch: Batch, live: int) -> list[str]:
    if found is None or not live:
        return []
    ends = torch.tensor(batch.new_lens[:live]).cumsum(0) - 1
    wrong = [row for row in range(live) if batch.new_lens[row] and int(found[row]) != int(ends[row])]
    return [f"get_last_indices gives {found[:live].tolist()}, expected {ends.tolist()}"] if wrong else []


def _positions(found: Tensor | None, batch: Batch, live: int) -> list[str]:
    tokens = sum(batch.new_lens[:live])
    if found is None or torch.equal(found[:tokens], batch.positions[:tokens].to(found.dtype)):
        return []
    return [f"positions are {found[:tokens].tolist()}, expected {batch.positions[:tokens].tolist()}"]
