"""Inputs read or outputs written with strides that they do not have."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import Plan, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import EAGER, PIECEWISE, VERIFY, plant


def packed(tensor: Tensor) -> Tensor:
    """The memory from a tensor's start on, read as if it were contiguous."""
    return torch.as_strided(tensor, tensor.shape, torch.empty(tensor.shape, device="meta").stride(), tensor.storage_offset())


class OneTokenPerRequest(SoftmaxSubject):
    def queries(self, q: Tensor, rows: Tensor, plan: Plan, batch: Batch) -> Tensor:
        if len(set(batch.new_lens)) != 1:
            return super().queries(q, rows, plan, batch)
        count, widest = rows.shape
        first = torch.arange(count, device=q.device)[:, None] + torch.arange(widest, device=q.device)
        return q[first.clamp(max=len(q) - 1)]


class StridesByShape(SoftmaxSubject):
    """Compiled for a contiguous call of the same shape before; queries, keys and values are read with its strides."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(packed(q), packed(k), packed(v), layer_id, batch)


class QueryStrides(SoftmaxSubject):
    def queries(self, q: Tensor, rows: Tensor, plan: Plan, batch: Batch) -> Tensor:
        return packed(q)[rows]


class ValueStridesOfKey(SoftmaxSubject):
    """Values start where keys do."""

    def write(self, k: Tensor, v: Tensor, layer: int, batch: Batch) -> None:
        super().write(k, k, layer, batch)


def _uniform(case: Case) -> bool:
    return case.batch_size > 1 and len(set(case.new_lens)) == 1 and case.new_lens[0] > 1


def _strided(case: Case) -> bool:
    return case.strided and case.num_tokens > 1


plant("B99", "request b's queries read from token b", OneTokenPerRequest, _uniform, (*EAGER, *PIECEWISE, *VERIFY))
plant("B100", "strided inputs read with the strides of a contiguous call of the same shape", StridesByShape, _strided, like=("X44",))
plant("X44", "strided queries read as contiguous", QueryStrides, _strided, kind="strides", title="Query stride assumed contiguous",
      like=("B100",))  # fmt: skip
plant("X45", "keys written in place of values", ValueStridesOfKey, lambda case: case.num_tokens > 0, kind="strides",
      title="Value pointer that of the keys")  # fmt: skip
