"""Faults of verify: whose state a draft token continues, and which states are kept where."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.lightning_subject import LightningSubject, StatePlan
from attnmatrix.harness.faults.lin_where import VERIFIES, is_tree, plant, verifies


class Chain(LightningSubject):
    def source(self, plan: StatePlan, node: int) -> Tensor:
        return torch.full_like(super().source(plan, node), node - 1)


class NoParents(LightningSubject):
    """Every draft token continues the live state."""

    def source(self, plan: StatePlan, node: int) -> Tensor:
        return torch.full_like(super().source(plan, node), -1)


class FirstRowsTree(LightningSubject):
    """One tree, the first request's, for the whole batch."""

    def source(self, plan: StatePlan, node: int) -> Tensor:
        own = super().source(plan, node)
        return own[:1].expand_as(own)


class LiveStateAdvanced(LightningSubject):
    """The last draft token's state overwrites the live one."""

    def keep(self, states: Tensor, outs: Tensor, drafted: Tensor, plan: StatePlan, batch: Batch) -> Tensor:
        self.scatter(states[:, -1], self.layer, plan)
        return super().keep(states, outs, drafted, plan, batch)

    def verify(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        self.layer = layer
        return super().verify(q, k, v, layer, plan, batch)


class OneDraftAsDecode(LightningSubject):
    """A verify of one draft token takes the decode path: the live state advances, no intermediate state is kept."""

    def verify(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        assert plan.parents is not None
        if plan.parents.shape[1] > 1:
            return super().verify(q, k, v, layer, plan, batch)
        return self.decode(q, k, v, layer, plan, batch)


class MeanDrafts(LightningSubject):
    """Tokens are divided evenly among the requests."""

    def plan(self, batch: Batch) -> StatePlan:
        plan = super().plan(batch)
        if plan.parents is None or len(set(plan.new_lens)) == 1:
            return plan
        mean, requests = batch.num_tokens // batch.padded_reqs, batch.padded_reqs
        starts = torch.arange(requests + 1, dtype=torch.int32, device=self.context.device) * mean
        chain = torch.arange(-1, mean - 1, device=self.context.device).repeat(requests, 1)
        return StatePlan(starts, plan.state_indices, chain, plan.prefix_lens, (mean,) * requests)

    def verify(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        out = super().verify(q, k, v, layer, plan, batch)
        return torch.cat([out, torch.full_like(q[out.shape[0] :], float("nan"))])


class Kept(LightningSubject):
    """Other intermediate states: ``kept`` maps the right ones ``[R, n, H, K, V]`` to those written."""

    def keep(self, states: Tensor, outs: Tensor, drafted: Tensor, plan: StatePlan, batch: Batch) -> Tensor:
        held = drafted[: states.shape[0], : states.shape[1]].clone()
        return super().keep(self.kept(states, held), outs, drafted, plan, batch)

    def kept(self, states: Tensor, held: Tensor) -> Tensor:
        raise NotImplementedError


class FirstMissing(Kept):
    def kept(self, states: Tensor, held: Tensor) -> Tensor:
        return torch.cat([held[:, :1], states[:, 1:]], dim=1)


class LastMissing(Kept):
    def kept(self, states: Tensor, held: Tensor) -> Tensor:
        return torch.cat([states[:, :-1], held[:, -1:]], dim=1)


class ShiftedLater(Kept):
    def kept(self, states: Tensor, held: Tensor) -> Tensor:
        return torch.cat([held[:, :1], states[:, :-1]], dim=1)


class LastEverywhere(Kept):
    def kept(self, states: Tensor, held: Tensor) -> Tensor:
        return states[:, -1:].expand_as(states)


class NoneKept(Kept):
    def kept(self, states: Tensor, held: Tensor) -> Tensor:
        return held


class KeptTransposed(Kept):
    def kept(self, states: Tensor, held: Tensor) -> Tensor:
        return states.transpose(-1, -2)


class KeptRounded(Kept):
    def kept(self, states: Tensor, held: Tensor) -> Tensor:
        return states.bfloat16().float()


class NextRequestsRow(Kept):
    def kept(self, states: Tensor, held: Tensor) -> Tensor:
        return states.roll(1, dims=0)


class LayersMixed(LightningSubject):
    """Every layer's intermediate states go to layer 0's buffer."""

    def keep(self, states: Tensor, outs: Tensor, drafted: Tensor, plan: StatePlan, batch: Batch) -> Tensor:
        assert self.context.states is not None
        first = self.context.states.as_kv(self.context.states.intermediate(0))
        return super().keep(states, outs, first, plan, batch)


class OutputBeforeDraft(LightningSubject):
    """A draft token's output is read from the state that it continues."""

    def verify(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        out = super().verify(q, k, v, layer, plan, batch)
        return out - (q * k).sum(dim=-1, keepdim=True) * v


def _one_draft(batch: Case) -> bool:
    return verifies(batch) and max(batch.new_lens) == 1


def _ragged(batch: Case) -> bool:
    return verifies(batch) and len(set(batch.new_lens)) > 1


def _several_drafts(batch: Case) -> bool:
    return verifies(batch) and max(batch.new_lens) > 1


def _several_requests(batch: Case) -> bool:
    return verifies(batch) and batch.batch_size > 1


def _trees_differ(batch: Case) -> bool:
    trees = {batch.tree(r) for r in range(batch.batch_size)}
    return verifies(batch) and any(a[: len(b)] != b[: len(a)] for a in trees for b in trees)


EAGER = (RunnerMode.VERIFY,)
KIND = "lin-spec-state"
plant("B139", KIND, "Tree drafts processed as a chain", "the draft tree taken as a chain", Chain, is_tree, VERIFIES,
      "sgl-project/sglang: linear/lightning")  # fmt: skip
plant("B140", KIND, "First snapshot never written", "the first draft token's intermediate state not written", FirstMissing,
      verifies, VERIFIES, "kekzl/imp#1503", ("Y61", "Y63", "Y57"))  # fmt: skip
plant("Y57", KIND, "Last draft's state missing", "the last draft token's intermediate state not written", LastMissing, verifies, VERIFIES,
      like=("B140", "Y61", "Y63"))  # fmt: skip
plant("Y58", KIND, "Verify overwrites the live state", "the live state overwritten by the last draft token's", LiveStateAdvanced,
      verifies, VERIFIES)  # fmt: skip
plant("Y59", KIND, "Verify of one draft taken for a decode",
      "a verify of one draft token run as a decode, which advances the live state and keeps no intermediate state",
      OneDraftAsDecode, _one_draft, VERIFIES)  # fmt: skip
plant("Y60", KIND, "Ragged verify with the mean number of drafts", "every request given the mean number of draft tokens",
      MeanDrafts, _ragged, EAGER)  # fmt: skip
plant("Y61", KIND, "Intermediate states one late", "each intermediate state written one draft token late", ShiftedLater, verifies, VERIFIES,
      like=("B140", "Y57", "Y63"))  # fmt: skip
plant("Y62", KIND, "One intermediate state for all drafts", "the last draft token's state kept for every draft token", LastEverywhere,
      _several_drafts, VERIFIES)  # fmt: skip
plant("Y63", KIND, "No intermediate states", "no intermediate state written", NoneKept, verifies, VERIFIES, like=("B140", "Y57", "Y61"))
plant(
    "Y64", KIND, "Intermediate states transposed", "intermediate states with key and value axes swapped", KeptTransposed, verifies, VERIFIES
)
plant("Y65", "precision", "Intermediate states rounded to bf16", "intermediate states rounded to bf16", KeptRounded, verifies, VERIFIES)
plant("Y66", KIND, "Intermediate states in the next row", "intermediate states written to the next request's row", NextRequestsRow,
      _several_requests, VERIFIES)  # fmt: skip
plant("Y67", KIND, "Intermediate states of all layers in one buffer", "every layer's intermediate states written to layer 0's buffer",
      LayersMixed, verifies, VERIFIES)  # fmt: skip
plant("Y68", KIND, "Draft output before its own update", "draft outputs read from the state before the update", OutputBeforeDraft,
      verifies, VERIFIES)  # fmt: skip
plant("Y69", KIND, "Drafts do not see each other", "every draft token continuing the live state", NoParents, _several_drafts, VERIFIES)
plant("Y70", KIND, "First request's tree for all", "the first request's draft tree used for every request", FirstRowsTree,
      _trees_differ, VERIFIES)  # fmt: skip
