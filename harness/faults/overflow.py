"""Offsets that wrap, scaled down so that they do in a small pool and land inside it."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import Plan, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import EAGER, PIECEWISE, VERIFY, always, plant, used_pages

PAGES, TOKENS, KEYS = 4, 16, 32  # where page ids, token offsets and key offsets wrap


class PageOffsetWraps(SoftmaxSubject):
    """Page times stride as a signed integer of three bits: from page ``PAGES`` on the offset is negative."""

    def slots(self, plan: Plan, layer: int, batch: Batch) -> Tensor:
        kv, size = self.context.kv, self.context.page_size
        assert kv is not None
        right = super().slots(plan, layer, batch)
        page = (right // size + PAGES) % (2 * PAGES) - PAGES
        return page % kv.num_pages * size + right % size


class KeyOffsetWraps(SoftmaxSubject):
    def read(self, slots: Tensor, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        keys, _ = super().read(slots % (PAGES * self.context.page_size), layer, batch)
        return keys, super().read(slots, layer, batch)[1]


class TokenOffsetWraps(SoftmaxSubject):
    def queries(self, q: Tensor, rows: Tensor, plan: Plan, batch: Batch) -> Tensor:
        return q[rows % TOKENS]


class ChunkOffsetWraps(SoftmaxSubject):
    def slots(self, plan: Plan, layer: int, batch: Batch) -> Tensor:
        right = super().slots(plan, layer, batch)
        return right[:, torch.arange(right.shape[1], device=right.device) % KEYS]


def _has_late_page(case: Case, mode: RunnerMode) -> bool:
    return any(page >= PAGES for page in used_pages(case, mode))


plant("B58", f"the offset of pages from {PAGES} on wrapped to negative", PageOffsetWraps, always, also=_has_late_page)
plant("B59", f"the keys' pages from {PAGES} on read modulo {PAGES}", KeyOffsetWraps, always, also=_has_late_page)
plant("B60", f"queries from token {TOKENS} on read modulo {TOKENS}", TokenOffsetWraps, lambda case: case.num_tokens > TOKENS,
      (*EAGER, *PIECEWISE, *VERIFY))  # fmt: skip
plant("B61", f"keys from position {KEYS} on read modulo {KEYS}", ChunkOffsetWraps, lambda case: max(case.kv_lens) > KEYS)
