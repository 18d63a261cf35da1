"""Buffers too small for what is put into them; what runs over lands in the neighbouring buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import Plan, SoftmaxSubject, edited
from attnmatrix.harness.faults.softmax_where import always, plant, several_requests

CG, GRAPH = (RunnerMode.CG_DECODE,), (RunnerMode.CG_DECODE, RunnerMode.VERIFY_CG)


class IndicesOverLengths(SoftmaxSubject):
    """Slots of all keys listed in a buffer with an entry per page; the lengths lie behind it and are overwritten by the rest."""

    def prepare_for_replay(self, batch: Batch) -> None:
        super().prepare_for_replay(batch)
        plan, context = self.captured[batch.padded_reqs], self.context
        room = batch.padded_reqs * context.pages_per_request
        rows = zip(batch.req_pool_indices.tolist(), batch.kv_lens, strict=True)
        listed = torch.cat([context.req_to_token[row, :length] for row, length in rows])
        over = listed[room : room + batch.padded_reqs]
        plan.cache_seqlens[: len(over)] = over.int()


class RowScatteredWide(SoftmaxSubject):
    """One column more scattered than a table row has: it lands in the first of the next row."""

    def page_table(self, batch: Batch) -> Tensor:
        right, size = super().page_table(batch), self.context.page_size
        beyond = self.context.req_to_token[batch.req_pool_indices, right.shape[1] * size].long() // size
        return torch.cat([torch.cat([right[:1, :1], beyond[:-1, None]]), right[:, 1:]], dim=1)


class DummyLengthsTooLong(SoftmaxSubject):
    """Every row of the capture as long as all its tokens and the longest request together."""

    def prepare_for_capture(self, batch: Batch) -> None:
        super().prepare_for_capture(batch)
        self.captured[batch.padded_reqs].cache_seqlens.fill_(batch.num_tokens + self.context.max_seq_len)


class NarrowTable(SoftmaxSubject):
    """Captured tables one page narrower than the longest request; the last page's keys are read from the one before."""

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        super().init_capture_graph(max_seq_len, batch_sizes)
        self.columns = max(1, self.context.pages_per_request - 2)

    def prepare_for_replay(self, batch: Batch) -> None:
        fresh: Plan = batch.attn_metadata
        table = fresh.page_table.clone()
        table[:, self.columns :] = table[:, self.columns - 1 : self.columns]
        batch.attn_metadata = edited(fresh, page_table=table)
        super().prepare_for_replay(batch)


def _long_rows(case: Case) -> bool:
    return case.page_size > 1 and min(case.kv_lens) > 2 * -(-max(case.kv_lens) // case.page_size) + 2


def _several_pages(case: Case) -> bool:
    return max(case.kv_lens) > case.page_size


plant("B18", "key lengths overwritten by the end of the index list", IndicesOverLengths, _long_rows, CG)
plant("B20", "the first page of a row overwritten by the row before", RowScatteredWide, several_requests, CG)
plant("B21", "dummy lengths at capture longer than a table row", DummyLengthsTooLong, always, GRAPH)
plant("X40", "the last page of the longest request cut off the captured table", NarrowTable, _several_pages, CG, kind="kv-oob",
      title="Captured table one page too narrow")  # fmt: skip
