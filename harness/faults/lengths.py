"""Key lengths that are not the request's own: off by one, of the whole batch, of the prefix or of the new tokens only."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case, ForwardMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import SPLIT, Plan, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import (
    ALL,
    DECODE,
    EXTEND,
    VERIFY,
    Rule,
    always,
    crosses_pages,
    decodes,
    extends,
    has_prefix,
    plant,
    ragged,
    requests,
    several_requests,
    splits,
)


class PrefixOnly(SoftmaxSubject):
    def key_lens(self, batch: Batch) -> Tensor:
        return batch.seq_lens.clone()


class LongestOfBatch(SoftmaxSubject):
    """Decode without a causal mask, its last split bounded by the longest request."""

    def ordered(self, draft: Tensor, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        right = super().ordered(draft, plan, rows, batch)
        return torch.ones_like(right) if batch.forward_mode is ForwardMode.DECODE else right

    def key_limit(self, plan: Plan, batch: Batch) -> Tensor:
        own = plan.cache_seqlens
        return torch.where(own.amax() > SPLIT, own.amax().expand_as(own), own) if batch.forward_mode is ForwardMode.DECODE else own


class Shifted(SoftmaxSubject):
    """Lengths ``by`` more than they are, where ``where`` says so; the table has a column for the key too many."""

    by = 0

    def where(self, lens: Tensor) -> Tensor:
        return torch.ones_like(lens, dtype=torch.bool)

    def key_lens(self, batch: Batch) -> Tensor:
        lens = super().key_lens(batch)
        return (lens + self.by * self.where(lens)).int()

    def page_table(self, batch: Batch) -> Tensor:
        size = self.context.page_size
        return self.context.req_to_token[batch.req_pool_indices, : max(batch.kv_lens, default=1) + max(0, self.by) : size].long() // size


class OneLong(Shifted):
    by = 1


class OneShort(Shifted):
    by = -1


class LastOneShort(OneShort):
    def where(self, lens: Tensor) -> Tensor:
        return torch.arange(len(lens), device=lens.device) == len(lens) - 1


class OneShortOnFullPage(OneShort):
    def where(self, lens: Tensor) -> Tensor:
        return lens % self.context.page_size == 0


class NewPageMissed(OneShort):
    def where(self, lens: Tensor) -> Tensor:
        return lens % self.context.page_size == min(1, self.context.page_size - 1)


class OneLongInDecode(OneLong):
    def where(self, lens: Tensor) -> Tensor:
        return torch.full_like(lens, self.context.forward_mode is ForwardMode.DECODE, dtype=torch.bool)


class NewTokensOnly(SoftmaxSubject):
    """The path for batches without any prefix, chosen because the first request has none."""

    def key_lens(self, batch: Batch) -> Tensor:
        lens = super().key_lens(batch)
        return batch.cu_seqlens_q.diff() if batch.prefix_lens and not batch.prefix_lens[0] else lens


class PageEnd(SoftmaxSubject):
    """Keys up to the end of the last page count, unless a causal mask hides them."""

    def ordered(self, draft: Tensor, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        single = plan.cu_seqlens_q.diff() == 1
        return super().ordered(draft, plan, rows, batch) | single[:, None, None]

    def key_limit(self, plan: Plan, batch: Batch) -> Tensor:
        size = self.context.page_size
        return (plan.cache_seqlens + size - 1) // size * size


class FewerKeysThanSplits(SoftmaxSubject):
    """The number of splits rounded down: what is left over after the last full split is dropped."""

    def key_limit(self, plan: Plan, batch: Batch) -> Tensor:
        lens = plan.cache_seqlens
        return torch.where(lens > SPLIT, lens // SPLIT * SPLIT, lens)


def _first_without_prefix(case: Case) -> bool:
    return extends(case) and case.prefix_lens[0] == 0 and has_prefix(case)


def _at_page(offset: int) -> Rule:
    return lambda case: any((prefix + new - offset) % case.page_size == 0 for prefix, new in requests(case))


ONE_SHORT = ("X04", "X05", "X06", "X41")

plant("B06", "the key length of a batch whose seq_lens count the prefix taken for the whole: the new keys unseen",
      PrefixOnly, always, VERIFY)  # fmt: skip
plant("B07", "every request's keys bounded by the longest request of the batch", LongestOfBatch,
      lambda case: decodes(case) and ragged(case) and splits(case), DECODE, like=("X03", "X07"))  # fmt: skip
plant("B28", "keys up to the end of the last page attended by requests with one new token", PageEnd,
      lambda case: any(new == 1 and (prefix + new) % case.page_size for prefix, new in requests(case)),
      like=("X03", "X07"))  # fmt: skip
plant(
    "X03", "every key length one too large", OneLong, always, ALL, kind="kv-length", title="Key length one too large", like=("X07", "B07")
)
plant("X04", "every key length one too small", OneShort, always, ALL, kind="kv-length", title="Key length one too small", like=ONE_SHORT)
plant("X05", "the last request's key length one too small", LastOneShort, several_requests, ALL, kind="kv-length",
      title="Last request one key short", like=ONE_SHORT,
      also=lambda case, mode: mode in (*EXTEND, *VERIFY))  # fmt: skip
plant("X06", "the key length one too small where it is a multiple of the page size", OneShortOnFullPage, _at_page(0), ALL,
      kind="kv-length", title="Last key dropped on a full page", like=ONE_SHORT)  # fmt: skip
plant("X41", "the first key of a new page not counted", NewPageMissed, lambda case: _at_page(1)(case) and crosses_pages(case), ALL,
      kind="kv-length", title="First key of a new page dropped", like=ONE_SHORT)  # fmt: skip
plant("X07", "every key length one too large in decode", OneLongInDecode, decodes, DECODE, kind="kv-length",
      title="Key length one too large in decode", like=("X03", "B07"))  # fmt: skip
plant("X08", "every request taken for one without prefix, since the first has none", NewTokensOnly, _first_without_prefix, EXTEND,
      kind="kv-length", title="Fast path without prefix chosen by the first request", like=("B49",))  # fmt: skip
plant("X09", f"keys beyond the last full split of {SPLIT} dropped", FewerKeysThanSplits,
      lambda case: any(prefix + new > SPLIT and (prefix + new) % SPLIT for prefix, new in requests(case)),
      kind="kv-length", title="Number of splits rounded down")  # fmt: skip
