"""Buffers that two calls share: what the second puts there is what the first reads, made certain instead of random."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import Plan, SoftmaxSubject, edited
from attnmatrix.harness.faults.softmax_where import always, crosses_pages, has_prefix, plant, several_requests

UNCAPTURED = (RunnerMode.EAGER, RunnerMode.VERIFY)


class ScratchNotZeroed(SoftmaxSubject):
    """Layer 0 leaves its sums in scratch that layer 1 takes for zeros."""

    left: Tensor | None = None

    def attend(self, scores: Tensor, visible: Tensor, values: Tensor, layer: int, batch: Batch) -> Tensor:
        out = super().attend(scores, visible, values, layer, batch)
        if layer and self.left is not None and self.left.shape == out.shape:
            out = out + self.left
        self.left = out
        return out


class StagedTable(SoftmaxSubject):
    """Page tables are built in one staging buffer, whose copy to the device is late."""

    def plan(self, batch: Batch) -> Plan:
        plan = super().plan(batch)
        if not hasattr(self, "staging"):
            self.staging = torch.zeros(self.context.max_reqs, self.context.pages_per_request, dtype=torch.int64, device=self.context.device)
        rows, columns = plan.page_table.shape
        self.staging[:rows, :columns] = plan.page_table
        return edited(plan, page_table=self.staging[:rows, :columns])


class SharedPlan(SoftmaxSubject):
    """Lengths and query starts of every plan live in the same buffers."""

    def plan(self, batch: Batch) -> Plan:
        plan, count = super().plan(batch), batch.padded_reqs
        if not hasattr(self, "shared"):
            self.shared = torch.zeros(2, self.context.max_reqs + 1, dtype=torch.int32, device=self.context.device)
        self.shared[0, : count + 1] = plan.cu_seqlens_q
        self.shared[1, :count] = plan.cache_seqlens
        return edited(plan, cu_seqlens_q=self.shared[0, : count + 1], cache_seqlens=self.shared[1, :count])


class RowRewritten(SoftmaxSubject):
    """Before layer 1 reads them, the table rows belong to other requests."""

    def slots(self, plan: Plan, layer: int, batch: Batch) -> Tensor:
        return super().slots(edited(plan, page_table=plan.page_table.roll(layer, 0)), layer, batch)


class StagedQueries(SoftmaxSubject):
    """Queries staged by shape: a second call of the same shape finds those of the first."""

    def queries(self, q: Tensor, rows: Tensor, plan: Plan, batch: Batch) -> Tensor:
        if not hasattr(self, "staged"):
            self.staged: dict[torch.Size, Tensor] = {}
        return self.staged.setdefault(q.shape, q.clone())[rows]


class MetadataOnBackend(SoftmaxSubject):
    """The page table of the batch prepared last serves all that has as many requests."""

    latest: Tensor | None = None

    def plan(self, batch: Batch) -> Plan:
        plan = super().plan(batch)
        self.latest = plan.page_table
        return plan

    def slots(self, plan: Plan, layer: int, batch: Batch) -> Tensor:
        latest = self.latest
        if latest is None or len(latest) != len(plan.page_table):
            return super().slots(plan, layer, batch)
        width = plan.page_table.shape[1]
        table = torch.nn.functional.pad(latest[:, :width], (0, max(0, width - latest.shape[1])))
        return super().slots(edited(plan, page_table=table), layer, batch)


class OldQueryStarts(SoftmaxSubject):
    """A batch with as many requests as the one before keeps its query starts."""

    def query_starts(self, batch: Batch) -> Tensor:
        if not hasattr(self, "starts"):
            self.starts: dict[int, Tensor] = {}
        return self.starts.setdefault(batch.padded_reqs, batch.cu_seqlens_q.clone())


def _uneven_steps(case: Case) -> bool:
    return case.batch_size > 1 and max(case.new_lens) > 1


plant("B106", "layer 0's result added to layer 1's", ScratchNotZeroed, always, UNCAPTURED)
plant("B107", "the page table of the batch prepared next", StagedTable, always, UNCAPTURED, like=("X49",))
plant("B108", "the lengths of the batch prepared next", SharedPlan, always, UNCAPTURED)
plant("B109", "the neighbour's table row in layer 1", RowRewritten, lambda case: several_requests(case) and has_prefix(case))
plant("B110", "the queries of an earlier call of the same shape", StagedQueries, always, UNCAPTURED)
plant("B92", "the query starts of the batch before", OldQueryStarts, _uneven_steps, (RunnerMode.EAGER,))
plant("X49", "the page table of the batch prepared last", MetadataOnBackend, crosses_pages, UNCAPTURED, kind="race",
      title="Metadata kept on the backend, not on the batch", like=("B107",))  # fmt: skip
