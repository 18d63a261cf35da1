"""Faults of the commit after a verify: which draft token's state becomes the live one, and where."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.lightning_subject import LightningSubject
from attnmatrix.harness.faults.lin_where import plant


class CommitFirst(LightningSubject):
    """The first draft token's state is taken whatever was accepted."""

    def commit(self, accepted: Tensor, batch: Batch) -> None:
        super().commit(accepted.clamp(max=1), batch)


class CommitLast(LightningSubject):
    """All draft tokens count as accepted."""

    def commit(self, accepted: Tensor, batch: Batch) -> None:
        super().commit(torch.tensor(batch.new_lens, device=accepted.device), batch)


class CommitNext(LightningSubject):
    """The state after the first rejected draft token is taken."""

    def commit(self, accepted: Tensor, batch: Batch) -> None:
        super().commit((accepted + 1).minimum(torch.tensor(batch.new_lens, device=accepted.device)), batch)


class CommitNone(LightningSubject):
    def commit(self, accepted: Tensor, batch: Batch) -> None:
        super().commit(accepted.clamp(max=0), batch)


class CommitAtLeastOne(LightningSubject):
    """Full rejection commits the first draft token's state."""

    def commit(self, accepted: Tensor, batch: Batch) -> None:
        super().commit(accepted.clamp(min=1), batch)


class CommitOneLayer(LightningSubject):
    """Only layer 0's states are committed."""

    def commit(self, accepted: Tensor, batch: Batch) -> None:
        kept = self.pool(1).clone()
        super().commit(accepted, batch)
        self.pool(1).copy_(kept)


class CommitBySlot(LightningSubject):
    """Intermediate states are looked up in the next request's row."""

    def commit(self, accepted: Tensor, batch: Batch) -> None:
        assert self.context.states is not None
        for layer in range(self.context.num_layers):
            drafted = self.context.states.intermediate(layer)
            kept = drafted[: batch.size].clone()
            drafted[: batch.size] = kept.roll(-1, dims=0)
            self._commit_layer(layer, accepted, batch)
            drafted[: batch.size] = kept

    def _commit_layer(self, layer: int, accepted: Tensor, batch: Batch) -> None:
        kept = [self.pool(other).clone() for other in range(self.context.num_layers)]
        super().commit(accepted, batch)
        for other, state in enumerate(kept):
            if other != layer:
                self.pool(other).copy_(state)


def _accepts(case: Case, mode: RunnerMode, wrong: str) -> bool:
    """A commit of the cell that a rule would change: ``first``, ``last``, ``next``, ``none``, ``zero`` or ``any``."""
    pairs = [
        (count, new)
        for step in schedule(case, mode).steps
        if step.accepted is not None
        for count, new in zip(step.accepted, step.case.new_lens, strict=True)
    ]
    changed = {
        "first": any(count > 1 for count, _ in pairs),
        "last": any(count < new for count, new in pairs),
        "none": any(count for count, _ in pairs),
        "zero": any(not count for count, _ in pairs),
    }
    return changed[wrong]


def _commit(
    id: str, title: str, diagnosis: str, subject: type[LightningSubject], wrong: str, source: str = "", like: tuple[str, ...] = ()
) -> None:
    plant(id, "lin-spec-state", title, diagnosis, subject, lambda b: True, (RunnerMode.VERIFY,), source, like,
          also=lambda case, mode: _accepts(case, mode, wrong))  # fmt: skip


_commit("B138", "Verify leaves the live state in slot accept-1, normal decode reads slot 0",
        "the first draft token's state committed whatever was accepted", CommitFirst, "first", "vllm-project/vllm#56531",
        ("Y90",))  # fmt: skip
_commit("Y87", "All draft tokens committed", "the last draft token's state committed whatever was accepted", CommitLast, "last",
        like=("Y88",))  # fmt: skip
_commit("Y88", "Commit one draft token late", "the state after the first rejected draft token committed", CommitNext, "last",
        like=("Y87", "Y89"))  # fmt: skip
_commit("Y89", "Full rejection commits a draft token", "the first draft token's state committed where none was accepted", CommitAtLeastOne,
        "zero", like=("Y88",))  # fmt: skip
_commit("Y90", "Nothing committed", "no draft token's state committed", CommitNone, "none", like=("B138",))
_commit("Y91", "Layer 0 alone committed", "states of layer 0 alone committed", CommitOneLayer, "none")
plant("Y92", "lin-spec-state", "Commit from the next request's row", "states committed from the next request's drafts", CommitBySlot,
      lambda b: b.batch_size > 1, (RunnerMode.VERIFY,), also=lambda case, mode: _accepts(case, mode, "none"))  # fmt: skip
