"""Faults of the slot that a state is read from or written to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.fault import NotInjected, add
from attnmatrix.harness.faults.lightning_subject import LightningSubject, StatePlan
from attnmatrix.harness.faults.lin_where import (
    EAGER,
    EXTENDS,
    GRAPHS,
    decodes,
    extends,
    has_prefix,
    has_tokens,
    plant,
)


class WrappedPadding(LightningSubject):
    """Plain indexing: -1 is the pool's last slot."""

    def gather(self, layer: int, plan: StatePlan) -> Tensor:
        return self.pool(layer)[plan.state_indices.long()].float()

    def scatter(self, after: Tensor, layer: int, plan: StatePlan) -> None:
        self.pool(layer)[plan.state_indices.long()] = after


class ClampedPadding(LightningSubject):
    """-1 clamped to slot 0, which is a live request's."""

    def scatter(self, after: Tensor, layer: int, plan: StatePlan) -> None:
        self.pool(layer)[plan.state_indices.clamp(min=0).long()] = after


class StaleTail(LightningSubject):
    """Replay refreshes the live rows only: padded rows keep the slots of requests that were in those rows before."""

    def prepare_for_replay(self, batch: Batch) -> None:
        static = self.captured[batch.padded_reqs]
        kept = static.state_indices[batch.size :].clone()
        super().prepare_for_replay(batch)
        static.state_indices[batch.size :] = kept


class FirstReplayKept(LightningSubject):
    """The slots of a captured size's first replay serve all its replays."""

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        super().init_capture_graph(max_seq_len, batch_sizes)
        self.replayed: set[int] = set()

    def prepare_for_replay(self, batch: Batch) -> None:
        static = self.captured[batch.padded_reqs]
        kept = static.state_indices.clone()
        super().prepare_for_replay(batch)
        if batch.padded_reqs in self.replayed:
            static.state_indices.copy_(kept)
        self.replayed.add(batch.padded_reqs)


class LargestRefreshed(LightningSubject):
    """Replay refreshes the buffers of the largest captured size, whichever graph runs."""

    def prepare_for_replay(self, batch: Batch) -> None:
        largest, fresh = self.captured[max(self.captured)], batch.attn_metadata
        largest.state_indices[: batch.padded_reqs].copy_(fresh.state_indices)


class PreparedLast(LightningSubject):
    """Metadata kept in one place: a batch runs with the slots of the one prepared last."""

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        self.last = batch.attn_metadata.state_indices

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        plan = replace(batch.attn_metadata, state_indices=self.last)
        return super().forward(q, k, v, layer_id, replace(batch, attn_metadata=plan))


class PageColumn(LightningSubject):
    """The column of the state table is the cached length over the attention page size; the table has one column, rows follow."""

    def initial_state(self, row: int, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        own = super().initial_state(row, layer, plan, batch)
        column = plan.prefix_lens[row] // self.context.page_size
        read = min(row + column, len(plan.new_lens) - 1)
        return self.pool(layer)[plan.state_indices[read]].float() if plan.prefix_lens[row] else own


class NeighbourRead(LightningSubject):
    def initial_state(self, row: int, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        return super().initial_state(row, layer, replace(plan, state_indices=plan.state_indices.roll(1)), batch)

    def gather(self, layer: int, plan: StatePlan) -> Tensor:
        return super().gather(layer, replace(plan, state_indices=plan.state_indices.roll(1)))


class NeighbourWritten(LightningSubject):
    def store(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        super().store(row, state, layer, replace(plan, state_indices=plan.state_indices.roll(1)), batch)

    def scatter(self, after: Tensor, layer: int, plan: StatePlan) -> None:
        super().scatter(after, layer, replace(plan, state_indices=plan.state_indices.roll(1)))


class FirstLayerRead(LightningSubject):
    """Layer 1 reads layer 0's state and writes its own."""

    def initial_state(self, row: int, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        return super().initial_state(row, 0, plan, batch)

    def gather(self, layer: int, plan: StatePlan) -> Tensor:
        return super().gather(0, plan)


class FirstLayerPool(LightningSubject):
    """Both layers live in layer 0's pool."""

    def pool(self, layer: int) -> Tensor:
        return super().pool(0)


class EmptyRowsSkipped(LightningSubject):
    """Rows without a token are left out of the row numbering, not out of the slot table."""

    def plan(self, batch: Batch) -> StatePlan:
        plan = super().plan(batch)
        filled = [row for row, new in enumerate(plan.new_lens) if new]
        slots = plan.state_indices.clone()
        for at, row in enumerate(filled):
            slots[row] = plan.state_indices[at]
        return replace(plan, state_indices=slots)


def _page_hit(batch: Case) -> bool:
    size, last = batch.page_size, batch.batch_size - 1
    lens = enumerate(zip(batch.prefix_lens, batch.new_lens, strict=True))
    return extends(batch) and any(n and p >= size and row < last for row, (p, n) in lens)


def _empty_before_filled(batch: Case) -> bool:
    return extends(batch) and any(not new and any(batch.new_lens[row:]) for row, new in enumerate(batch.new_lens))


def _several(batch: Case) -> bool:
    return batch.batch_size > 1 and has_tokens(batch)


def _reads_neighbour(batch: Case) -> bool:
    return _several(batch) and has_prefix(batch)


def _writes_neighbour(batch: Case) -> bool:
    return _several(batch) and (extends(batch) or decodes(batch))


KIND = "lin-state-slot"
DECODE_GRAPH = (RunnerMode.CG_DECODE,)
plant("B117", KIND, "Slot -1 wraps to the last slot of the pool", "padded rows reading and writing the pool's last slot",
      WrappedPadding, decodes, DECODE_GRAPH, "flashinfer-ai/flashinfer#5042")  # fmt: skip
plant("B119", KIND, "State column computed with the attention page size",
      "the cached state read from a slot table entry as many columns on as pages are cached",
      PageColumn, _page_hit, EXTENDS, "vllm-project/vllm#55600")  # fmt: skip
add(NotInjected("B120", KIND, "Conv update reads the head of an oversized state", "pending", "waits for a conv state in the pool"))
plant("B121", KIND, "Padded rows keep the slots of an earlier batch", "padded rows updating the slots of requests of an earlier replay",
      StaleTail, decodes, DECODE_GRAPH, "NVIDIA/TensorRT-LLM#13278")  # fmt: skip
plant("Y13", KIND, "Slot -1 clamped to slot 0", "padded rows writing slot 0", ClampedPadding, decodes, DECODE_GRAPH)
plant("Y14", KIND, "Replays keep the first replay's slots", "the state slots of the first replay", FirstReplayKept, has_tokens, GRAPHS)
plant("Y15", KIND, "Replay refreshes another size's buffers", "state slots refreshed in the largest captured size only",
      LargestRefreshed, has_tokens, GRAPHS)  # fmt: skip
plant("Y16", KIND, "Slots of the batch prepared last", "the state slots of the batch that was prepared last",
      PreparedLast, has_tokens, (*EAGER, RunnerMode.VERIFY))  # fmt: skip
plant("Y17", KIND, "State of the neighbouring request", "the cached state of the request before it in the batch",
      NeighbourRead, _reads_neighbour, like=("B119",))  # fmt: skip
plant("Y18", KIND, "State written to the neighbour's slot", "the final state written to the slot of the request before it",
      NeighbourWritten, _writes_neighbour, (*EXTENDS, *DECODE_GRAPH))  # fmt: skip
plant("Y19", KIND, "Layer 1 reads layer 0's state", "layer 1 starting from layer 0's state", FirstLayerRead, has_prefix, like=("Y20",))
plant("Y20", KIND, "All layers in layer 0's pool", "every layer's state kept in layer 0's pool", FirstLayerPool, has_tokens, like=("Y19",))
plant("Y21", KIND, "Empty rows left out of the row numbering", "requests behind one without tokens taking the slots of those before them",
      EmptyRowsSkipped, _empty_before_filled, EXTENDS)  # fmt: skip
