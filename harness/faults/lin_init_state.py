"""Faults of the state that an extend, decode or verify starts from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnmatrix.cases.case import Case, ForwardMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.lightning_subject import LightningSubject, StatePlan
from attnmatrix.harness.faults.lin_where import (
    DECODES,
    EXTENDS,
    VERIFIES,
    decodes,
    extends,
    extends_prefix,
    has_fresh,
    has_prefix,
    plant,
    rows,
    verifies,
)

OLD_HEAD_DIM = 64


class DroppedForOneRequest(LightningSubject):
    def initial_state(self, row: int, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        state = super().initial_state(row, layer, plan, batch)
        return torch.zeros_like(state) if len(plan.new_lens) == 1 else state


class Dropped(LightningSubject):
    def initial_state(self, row: int, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        return torch.zeros_like(super().initial_state(row, layer, plan, batch))


class DroppedForOneToken(LightningSubject):
    def initial_state(self, row: int, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        state = super().initial_state(row, layer, plan, batch)
        return torch.zeros_like(state) if plan.new_lens[row] == 1 else state


class DroppedInMixed(LightningSubject):
    def initial_state(self, row: int, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        state = super().initial_state(row, layer, plan, batch)
        return torch.zeros_like(state) if batch.forward_mode is ForwardMode.MIXED else state


class Stale(LightningSubject):
    """Starts from whatever the slot holds wherever ``unmasked`` says so."""

    def unmasked(self, row: int, plan: StatePlan) -> bool:
        return True

    def initial_state(self, row: int, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        if self.unmasked(row, plan):
            return self.pool(layer)[plan.state_indices[row]].float()
        return super().initial_state(row, layer, plan, batch)


class StaleInOneTokenBatch(Stale):
    def unmasked(self, row: int, plan: StatePlan) -> bool:
        return set(plan.new_lens) == {1}


class StaleForOneToken(Stale):
    def unmasked(self, row: int, plan: StatePlan) -> bool:
        return plan.new_lens[row] == 1


class StaleBesidePrefix(Stale):
    def unmasked(self, row: int, plan: StatePlan) -> bool:
        return any(plan.prefix_lens)


class OneTokenPath(LightningSubject):
    """Batches of at most one new token per request on average: token r is taken for the one of request r, from the slot's state."""

    def extend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        if q.shape[0] > len(plan.new_lens):
            return super().extend(q, k, v, layer, plan, batch)
        out = torch.full_like(q, float("nan"))
        for row in range(q.shape[0]):
            before = self.pool(layer)[plan.state_indices[row]].float()
            after = self.step(before[None], k[row, None], v[row, None], layer)[0]
            self.store(row, after, layer, plan, batch)
            out[row] = torch.einsum("hd,hde->he", q[row], after)
        return out


class TransposedInExtend(LightningSubject):
    def initial_state(self, row: int, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        return super().initial_state(row, layer, plan, batch).transpose(-1, -2)


class TransposedInDecode(LightningSubject):
    def gather(self, layer: int, plan: StatePlan) -> Tensor:
        return super().gather(layer, plan).transpose(-1, -2)


class FirstRowsOnly(LightningSubject):
    """Reads the key rows of a smaller head dim."""

    @staticmethod
    def cut(state: Tensor) -> Tensor:
        return torch.cat([state[..., :OLD_HEAD_DIM, :], torch.zeros_like(state[..., OLD_HEAD_DIM:, :])], dim=-2)

    def initial_state(self, row: int, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        return self.cut(super().initial_state(row, layer, plan, batch))

    def gather(self, layer: int, plan: StatePlan) -> Tensor:
        return self.cut(super().gather(layer, plan))


class HeadsRolled(LightningSubject):
    def initial_state(self, row: int, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        return super().initial_state(row, layer, plan, batch).roll(1, dims=0)

    def gather(self, layer: int, plan: StatePlan) -> Tensor:
        return super().gather(layer, plan).roll(1, dims=1)


class ZeroInVerify(LightningSubject):
    def gather(self, layer: int, plan: StatePlan) -> Tensor:
        state = super().gather(layer, plan)
        return state if plan.parents is None else torch.zeros_like(state)


def _prefix_where(rule: Callable[[Case, int, int], bool]) -> Callable[[Case], bool]:
    return lambda batch: extends(batch) and any(p and rule(batch, p, n) for p, n in rows(batch))


def _stale_one_token_batch(batch: Case) -> bool:
    return has_fresh(batch) and set(batch.new_lens) == {1}


def _one_token_path(batch: Case) -> bool:
    uneven = set(batch.new_lens) != {1}
    return extends(batch) and batch.num_tokens <= batch.batch_size and (uneven or 0 in batch.prefix_lens)


def _wide(batch: Case) -> bool:
    return has_prefix(batch) and batch.heads.dim > OLD_HEAD_DIM


KIND = "lin-init-state"
plant("B113", KIND, "Initial state dropped for batch size 1", "the cached state dropped in batches of one request",
      DroppedForOneRequest, lambda b: extends_prefix(b) and b.batch_size == 1, EXTENDS, "vllm-project/vllm#22034", ("Y05", "Y06"))  # fmt: skip
plant("B115", KIND, "State read with key and value axes swapped", "the cached state transposed before an extend reads it",
      TransposedInExtend, extends_prefix, EXTENDS, "vllm-project/vllm#41292")  # fmt: skip
plant("Y01", KIND, "Stale state in requests without prefix", "the initial state not masked for requests without a prefix",
      Stale, has_fresh, EXTENDS, like=("Y02", "Y03", "Y04", "Y10"))  # fmt: skip
plant("Y02", KIND, "Stale state in batches of one token each", "the initial state not masked where every request has one new token",
      StaleInOneTokenBatch, _stale_one_token_batch, EXTENDS, like=("Y01", "Y03", "Y04"))  # fmt: skip
plant("Y03", KIND, "Stale state in one-token requests", "the initial state not masked for one-token requests without a prefix",
      StaleForOneToken, lambda b: has_fresh(b) and (0, 1) in rows(b), EXTENDS, like=("Y01", "Y02", "Y04", "Y10"))  # fmt: skip
plant("Y04", KIND, "One-token kernel taken by the average length",
      "token r computed as the one token of request r, from its slot's state, in batches of at most one token per request on average",
      OneTokenPath, _one_token_path, EXTENDS, like=("Y01", "Y02", "Y03"))  # fmt: skip
plant("Y05", KIND, "Initial state dropped", "the cached state dropped",
      Dropped, extends_prefix, EXTENDS, like=("B113", "Y06", "Y07"))  # fmt: skip
plant("Y06", KIND, "Initial state dropped for one-token requests", "the cached state dropped for requests with one new token",
      DroppedForOneToken, _prefix_where(lambda b, p, n: n == 1), EXTENDS, like=("B113", "Y05", "Y07"))  # fmt: skip
plant("Y07", KIND, "Initial state dropped in mixed batches", "the cached state dropped in mixed batches",
      DroppedInMixed, lambda b: extends_prefix(b) and b.forward is ForwardMode.MIXED, EXTENDS, like=("Y05", "Y06"))  # fmt: skip
plant("Y08", KIND, "State read transposed in decode", "the state transposed before decode or verify reads it",
      TransposedInDecode, lambda b: decodes(b) or verifies(b), (*DECODES, *VERIFIES))  # fmt: skip
plant("Y09", KIND, "Head dim constant left at 64", "only the first 64 key rows of the cached state read", FirstRowsOnly, _wide)
plant("Y10", KIND, "One flag masks the whole batch", "the initial state not masked where another request has a prefix",
      StaleBesidePrefix, lambda b: has_fresh(b) and any(b.prefix_lens), EXTENDS, like=("Y01", "Y03"))  # fmt: skip
plant("Y11", KIND, "State read from the next head", "the cached state read from the neighbouring head",
      HeadsRolled, lambda b: has_prefix(b) and b.heads.q > 1)  # fmt: skip
plant("Y12", KIND, "Verify starts from zero", "draft tokens verified from an empty state", ZeroInVerify, verifies, VERIFIES)
