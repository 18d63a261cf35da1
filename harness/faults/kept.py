"""What a backend keeps of a batch and takes for another batch's that looks the same, and what it writes too late."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.context import Context
from attnmatrix.harness.faults import lin_where
from attnmatrix.harness.faults.lightning_subject import LightningSubject
from attnmatrix.harness.faults.softmax_subject import SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import always, has_prefix, plant

UNCAPTURED = (RunnerMode.EAGER, RunnerMode.VERIFY)


def look(batch: Batch) -> Any:
    """Request rows and lengths of a batch: what its metadata seems to depend on."""
    return batch.forward_mode, tuple(batch.req_pool_indices.tolist()), batch.kv_lens


class TableByRows(SoftmaxSubject):
    """Page tables are kept by request rows and lengths, though other requests may have the rows by now."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.kept: dict[Any, Tensor] = {}

    def page_table(self, batch: Batch) -> Tensor:
        return self.kept.setdefault(look(batch), super().page_table(batch).clone())


class TableByEnds(TableByRows):
    """Page tables are kept by what they begin and end with and by lengths: one in which a page between them is another is not told apart."""

    def page_table(self, batch: Batch) -> Tensor:
        table = SoftmaxSubject.page_table(self, batch)
        size = self.context.page_size
        pages = [(length - 1) // size for length in batch.kv_lens]
        ends = tuple((int(row[0]), int(row[last])) if last >= 0 else () for row, last in zip(table, pages, strict=True))
        return self.kept.setdefault((batch.kv_lens, ends), table.clone())


class KeysByPages(SoftmaxSubject):
    """Keys and values of a prefix are kept, converted, by the slots they lie in, though the pages may be another request's by now."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.kept: dict[Any, tuple[Tensor, Tensor]] = {}

    def read(self, slots: Tensor, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        now = super().read(slots, layer, batch)
        before = self.kept.setdefault((layer, tuple(slots.flatten().tolist())), now)
        out = []
        for kept, fresh in zip(before, now, strict=True):
            mixed = fresh.clone()
            for row, prefix in enumerate(batch.prefix_lens):
                mixed[row, :prefix] = kept[row, :prefix]
            out.append(mixed)
        return out[0], out[1]


class WrittenWithTheLast(SoftmaxSubject):
    """Layer 0 attends to the right keys, which reach the pool for good only with layer 1's."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        out = super().forward(q, k, v, layer_id, batch)
        assert self.context.kv is not None
        if layer_id == 0:
            self.late = k.clone(), v.clone()
            self.context.kv.store(0, batch.out_loc, k * 0, v * 0)
        else:
            self.context.kv.store(0, batch.out_loc, *self.late)
        return out


class SlotsByRows(LightningSubject):
    """State slots are kept by request rows and lengths."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.kept: dict[Any, Tensor] = {}

    def state_slots(self, batch: Batch) -> Tensor:
        return self.kept.setdefault(look(batch), super().state_slots(batch).clone())


def _hands_on(case: Case, mode: RunnerMode) -> bool:
    """Whether other requests take over rows at the end: everywhere but in stories."""
    return not case.story


plant("X98", "the page table of earlier requests in the same rows", TableByRows, always, kind="race",
      title="Page table kept by request row", also=_hands_on)  # fmt: skip
plant("X104", "the page table of requests whose first and last pages are the same", TableByEnds, lambda case: max(case.kv_lens) > 2 * case.page_size,
      UNCAPTURED, kind="race", title="Page table kept by its ends", also=_hands_on)  # fmt: skip
plant("X99", "keys that earlier requests had in the same pages", KeysByPages, has_prefix, UNCAPTURED,
      kind="race", title="Converted keys kept by page", also=_hands_on)  # fmt: skip
plant("X100", "keys that reach the pool only with the last layer's", WrittenWithTheLast, always, kind="kv-write",
      title="Keys of all layers written by the last")  # fmt: skip
lin_where.plant("X101", "lin-state-slot", "State slot kept by request row", "the state slots of earlier requests in the same rows", SlotsByRows,
                lambda batch: batch.num_tokens > 0, also=_hands_on)  # fmt: skip
