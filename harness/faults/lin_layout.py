"""Faults of the state pool's layout: a pool that holds ``[V, K]`` states, taken somewhere for one of ``[K, V]``."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.context import Context
from attnmatrix.harness.faults.fault import Fault, add
from attnmatrix.harness.faults.lightning_subject import LightningSubject, StatePlan
from attnmatrix.harness.faults.lin_where import ALL, EXTENDS, Rule, decodes, extends, verifies

VALUES_FIRST = Conventions(state_layout="VK")


class TransposeForgotten(LightningSubject):
    """Every buffer is read and written as ``[K, V]``."""

    def __init__(self, context: Context) -> None:
        states = copy.copy(context.states)
        assert states is not None
        states.layout = "KV"
        super().__init__(replace(context, states=states))


class SnapshotAsKeysFirst(LightningSubject):
    """Snapshots are written as ``[K, V]``."""

    def snapshot(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        super().snapshot(row, state.mT, layer, plan, batch)


def _plant(
    id: str,
    title: str,
    diagnosis: str,
    subject: type[LightningSubject],
    alters: Rule,
    modes: tuple[RunnerMode, ...],
    like: tuple[str, ...] = (),
) -> None:
    def applies(case: Case, mode: RunnerMode) -> bool:
        if case.kind is not AttentionKind.LIGHTNING or mode not in modes or case.forward not in mode.forward_modes:
            return False
        return any(alters(batch) for batch in schedule(case, mode).batches)

    add(
        Fault(
            id,
            "lin-layout",
            title,
            diagnosis,
            AttentionKind.LIGHTNING,
            modes,
            applies,
            subject,
            LightningSubject,
            like=like,
            conventions=VALUES_FIRST,
        )
    )


_plant("Y93", "Transpose of the state forgotten", "[V, K] states read and written as [K, V]", TransposeForgotten,
       lambda b: extends(b) or decodes(b) or verifies(b), ALL, like=("B115", "Y08", "Y49", "Y64"))  # fmt: skip
_plant("Y94", "Snapshot written without its transpose", "[V, K] snapshots written as [K, V]", SnapshotAsKeysFirst,
       lambda b: extends(b) and any(b.track_lens), EXTENDS, like=("Y93",))  # fmt: skip
