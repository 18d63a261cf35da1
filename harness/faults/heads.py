"""Query heads paired with the wrong key/value head, and head dims of the wrong size."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import Plan, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import plant

LANES = 64  # key dims that enter a score


class OddHeadLeftOut(SoftmaxSubject):
    """A group is taken in pairs of query heads, their number rounded down: the last head of an odd group is never computed."""

    def scatter(self, out: Tensor, rows: Tensor, present: Tensor, q: Tensor) -> Tensor:
        group, written = self.context.heads.group, super().scatter(out, rows, present, q)
        computed = torch.arange(q.shape[1], device=q.device) % group < group // 2 * 2
        return torch.where(computed[None, :, None], written, torch.empty_like(written))


class Mapped(SoftmaxSubject):
    """Query head h reads key/value head ``self.head(h)``."""

    layers: tuple[int, ...] = (0, 1)

    def head(self, index: Tensor) -> Tensor:
        return index // self.context.heads.group

    def scores(self, queries: Tensor, keys: Tensor, plan: Plan, rows: Tensor, layer: int, batch: Batch) -> Tensor:
        self.layer = layer
        return super().scores(queries, keys, plan, rows, layer, batch)

    def expand(self, tensor: Tensor) -> Tensor:
        if self.layer not in self.layers:
            return super().expand(tensor)
        return tensor[:, :, self.head(torch.arange(self.context.heads.q, device=tensor.device))]


class GeometryOfTarget(Mapped):
    """Layer 1's heads grouped as if it had half as many key/value heads."""

    layers = (1,)

    def head(self, index: Tensor) -> Tensor:
        return index // (2 * self.context.heads.group)


class HeadModulo(Mapped):
    def head(self, index: Tensor) -> Tensor:
        return index % self.context.heads.kv


class GroupIsPowerOfTwo(Mapped):
    def head(self, index: Tensor) -> Tensor:
        group = 1 << (self.context.heads.group.bit_length() - 1)
        return (index // group).clamp(max=self.context.heads.kv - 1)


class HalfTheDims(SoftmaxSubject):
    def scores(self, queries: Tensor, keys: Tensor, plan: Plan, rows: Tensor, layer: int, batch: Batch) -> Tensor:
        return super().scores(queries[..., :LANES], keys[..., :LANES], plan, rows, layer, batch)


class ValueTailLost(SoftmaxSubject):
    """Dims beyond the last full 32 are not multiplied: the output is zero there."""

    def read(self, slots: Tensor, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        keys, values = super().read(slots, layer, batch)
        whole = torch.arange(values.shape[-1], device=values.device) < values.shape[-1] // 32 * 32
        return keys, values * whole.to(values.dtype)


class QueryHeadsRolled(SoftmaxSubject):
    """Queries of each group's first heads go to the group before."""

    def queries(self, q: Tensor, rows: Tensor, plan: Plan, batch: Batch) -> Tensor:
        return q.roll(1, dims=1)[rows]


def _odd_group(case: Case) -> bool:
    return case.heads.group % 2 == 1


def _ragged_group(case: Case) -> bool:
    group = case.heads.group
    return case.heads.kv > 1 and group & (group - 1) != 0


plant("B62", "the last query head of each odd group not computed", OddHeadLeftOut, _odd_group)
plant("B63", "layer 1's query heads grouped for half as many key/value heads", GeometryOfTarget, lambda case: case.heads.kv > 1)
plant("B66", f"only the first {LANES} dims in the scores", HalfTheDims, lambda case: case.heads.dim > LANES)
plant("X21", "query head h reading key/value head h % Hkv", HeadModulo, lambda case: case.heads.kv > 1 and case.heads.group > 1,
      kind="head-map", title="Heads interleaved instead of grouped")  # fmt: skip
plant("X22", "the group size rounded down to a power of two", GroupIsPowerOfTwo, _ragged_group, kind="head-map",
      title="Group size rounded down to a power of two")  # fmt: skip
plant("X23", "value dims beyond a multiple of 32 lost", ValueTailLost, lambda case: case.heads.dim % 32 != 0, kind="head-map",
      title="Head dim rounded down to a multiple of 32")  # fmt: skip
plant("X24", "query heads rolled by one", QueryHeadsRolled, lambda case: case.heads.q > 1, kind="head-map",
      title="Query heads shifted by one")  # fmt: skip
