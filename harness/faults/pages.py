"""Page tables read wrongly: other units, other order, other rows, pages left out."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case, Placement
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.lengths import PageEnd
from attnmatrix.harness.faults.softmax_subject import Plan, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import (
    DECODE,
    EXTEND,
    VERIFY,
    crosses_pages,
    decodes,
    has_prefix,
    plant,
    ragged,
    several_requests,
)

LARGE_PAGE, STEP = 128, 4096  # beyond STEP keys pages larger than LARGE_PAGE are stepped over
MIDDLE = 4  # the page of a long table that is read wrong


class Pool(SoftmaxSubject):
    @property
    def num_pages(self) -> int:
        assert self.context.kv is not None
        return self.context.kv.num_pages


class SlotsAsPages(Pool):
    def page_table(self, batch: Batch) -> Tensor:
        right = super().page_table(batch)
        return self.context.req_to_token[batch.req_pool_indices, : right.shape[1]].long() % self.num_pages


class MiddlePagesSkipped(SoftmaxSubject):
    def visible(self, plan: Plan, rows: Tensor, layer: int, batch: Batch) -> Tensor:
        right, size = super().visible(plan, rows, layer, batch), self.context.page_size
        if size <= LARGE_PAGE:
            return right
        page = torch.arange(right.shape[-1], device=rows.device) // size
        last = (plan.cache_seqlens[:, None] - 1) // size
        return right & ((page * size < STEP)[None, :] | (page[None, :] == last))[:, None, :]


class UnusedEntriesAreSlotZero(PageEnd):
    """Entries past the length are 0 instead of -1, so the mask on negative entries never fires."""

    def key_limit(self, plan: Plan, batch: Batch) -> Tensor:
        return torch.full_like(plan.cache_seqlens, plan.page_table.shape[1] * self.context.page_size)

    def slots(self, plan: Plan, layer: int, batch: Batch) -> Tensor:
        right = super().slots(plan, layer, batch)
        index = torch.arange(right.shape[1], device=right.device)
        return torch.where(index[None, :] < plan.cache_seqlens[:, None], right, 0)


class CountedFromFirstSlot(Pool):
    def slots(self, plan: Plan, layer: int, batch: Batch) -> Tensor:
        size = self.context.page_size
        columns = torch.arange(plan.page_table.shape[1] * size, device=plan.page_table.device)
        return (plan.page_table[:, :1] * size + columns) % (self.num_pages * size)


class DraftSlotsStepMajor(SoftmaxSubject):
    def slots(self, plan: Plan, layer: int, batch: Batch) -> Tensor:
        right, width = super().slots(plan, layer, batch), plan.new_lens[0]
        draft = torch.arange(right.shape[1], device=right.device)[None, :] - self.prefix(plan)[:, None]
        transposed = batch.out_loc.view(width, -1).T
        return torch.where((draft >= 0) & (draft < width), transposed.gather(1, draft.clamp(0, width - 1)), right)


class PageReadTwice(SoftmaxSubject):
    def page_table(self, batch: Batch) -> Tensor:
        table = super().page_table(batch).clone()
        if table.shape[1] > MIDDLE:
            table[:, MIDDLE] = table[:, MIDDLE - 1]
        return table


class FirstPageShared(SoftmaxSubject):
    def page_table(self, batch: Batch) -> Tensor:
        table = super().page_table(batch).clone()
        if table.shape[1]:
            table[:, 0] = table[:1, 0]
        return table


class RowsInOrder(SoftmaxSubject):
    def page_table(self, batch: Batch) -> Tensor:
        size, count = self.context.page_size, len(batch.req_pool_indices)
        return self.context.req_to_token[:count, : max(batch.kv_lens, default=1) : size].long() // size


class TableOfPrefix(SoftmaxSubject):
    """As many columns as the cached pages need; keys in a page begun by the new tokens are read from the page before."""

    def page_table(self, batch: Batch) -> Tensor:
        table = super().page_table(batch)
        held = -(-max([1, *batch.prefix_lens]) // self.context.page_size)
        return torch.cat([table[:, :held], table[:, held - 1 : held].expand(-1, max(0, table.shape[1] - held))], dim=1)


class PagesOfSixteen(Pool):
    def slots(self, plan: Plan, layer: int, batch: Batch) -> Tensor:
        size = self.context.page_size
        index = torch.arange(plan.page_table.shape[1] * size, device=plan.page_table.device)
        column = (index // 16).clamp(max=plan.page_table.shape[1] - 1)
        return (plan.page_table[:, column] * 16 + index % 16) % (self.num_pages * size)


class WholePromptCached(SoftmaxSubject):
    """A request without a new token is given one all the same, and the rows behind it move up."""

    def query_starts(self, batch: Batch) -> Tensor:
        new = batch.cu_seqlens_q.diff()
        cached = torch.tensor([prefix > 0 for prefix in batch.prefix_lens], device=new.device)
        lens = torch.where((new == 0) & cached, 1, new)
        return torch.cat([batch.cu_seqlens_q[:1], lens.cumsum(0).int()])


def _long_large_pages(case: Case) -> bool:
    return case.page_size > LARGE_PAGE and max(case.kv_lens) > STEP + 2 * case.page_size


def _grows_a_page(case: Case) -> bool:
    return -(-max(case.kv_lens) // case.page_size) > max(1, -(-max(case.prefix_lens) // case.page_size))


plant(
    "B12",
    "the slots of a request's tokens taken for its pages",
    SlotsAsPages,
    lambda case: case.page_size > 1 and crosses_pages(case) and case.placement is not Placement.CONTIGUOUS,
)
plant("B14", f"the pages between key {STEP} and the last page left out", MiddlePagesSkipped, _long_large_pages)
plant("B15", "unused entries of the slot list read as slot 0", UnusedEntriesAreSlotZero,
      lambda case: decodes(case) and (ragged(case) or any(length % case.page_size for length in case.kv_lens)), DECODE)  # fmt: skip
plant("B16", "the slots of a request counted on from its first", CountedFromFirstSlot,
      lambda case: crosses_pages(case) and case.placement is not Placement.CONTIGUOUS)  # fmt: skip
plant("B17", "the draft tokens' slots read step by step instead of request by request", DraftSlotsStepMajor,
      lambda case: case.batch_size > 1 and len(set(case.new_lens)) == 1 and case.new_lens[0] > 1, VERIFY,
      also=lambda case, mode: len(set(case.new_lens)) == 1)  # fmt: skip
plant("B147", "the first request's first page read for every request", FirstPageShared,
      lambda case: several_requests(case) and case.placement is not Placement.SHARED,
      also=lambda case, mode: mode not in VERIFY)  # fmt: skip
plant("B148", "a request whose prompt is all cached given a new token", WholePromptCached,
      lambda case: any(prefix and not new for prefix, new in zip(case.prefix_lens, case.new_lens, strict=True)), EXTEND)  # fmt: skip
plant("X10", f"page {MIDDLE} of every longer table read from the page before", PageReadTwice,
      lambda case: max(case.kv_lens) > MIDDLE * case.page_size, kind="page-index", title="One page of a long table wrong")  # fmt: skip
plant("X11", "table rows taken in order instead of by request id", RowsInOrder, has_prefix, kind="page-index",
      title="Request ids ignored in the table look-up")  # fmt: skip
plant("X12", "the page that the new tokens begin read from the page before", TableOfPrefix, _grows_a_page, kind="page-index",
      title="Page table sized by the cached prefix")  # fmt: skip
plant("X13", "pages of 16 tokens assumed", PagesOfSixteen, lambda case: case.page_size != 16 and crosses_pages(case),
      kind="page-index", title="Page size a constant")  # fmt: skip
