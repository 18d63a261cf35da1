"""Rows whose graphs go on with what was true at capture: red with the fault switched on, green with it off."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.layouts import decode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.speculative import SIBLINGS, verify
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax, UniformMetadata
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.cell import CellResult

Outcome = Callable[..., CellResult]
DECODE = decode(16, (40, 20, 33), AttentionKind.SOFTMAX, dtype="fp32")
TREE = verify(16, (14, 31), 6, AttentionKind.SOFTMAX, trees=(SIBLINGS,), dtype="fp32")


class LengthsOnTheHost(TorchSoftmax):
    """Lengths read on the host inside forward: frozen by a capture, if it were allowed."""

    broken: bool

    def _forward_uniform(self, q: Tensor, layer: int, batch: Batch, meta: UniformMetadata) -> Tensor:
        if self.broken:
            meta = replace(meta, prefix=torch.tensor(meta.prefix.tolist(), dtype=torch.int32))
        return super()._forward_uniform(q, layer, batch, meta)


class EagerTableRefreshed(TorchSoftmax):
    """The replay gets a new table while the captured kernels read the old one."""

    broken: bool

    def prepare_for_replay(self, batch: Batch) -> None:
        if not self.broken:
            return super().prepare_for_replay(batch)
        static, fresh = self._static[batch.padded_reqs], batch.attn_metadata
        static.prefix.copy_(fresh.prefix)
        static.slots = fresh.slots
        return None


class LengthsRebound(TorchSoftmax):
    """The captured length buffer is set to other memory, so the graph's pointer is left behind."""

    broken: bool

    def prepare_for_replay(self, batch: Batch) -> None:
        static, fresh = self._static[batch.padded_reqs], batch.attn_metadata
        if self.broken:
            static.prefix.set_(fresh.prefix.clone())
        super().prepare_for_replay(batch)


class PlanMadeOnce(TorchSoftmax):
    """A plan derived from the first replay's lengths is kept for all others."""

    broken: bool

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        super().init_capture_graph(max_seq_len, batch_sizes)
        self._planned: set[int] = set()

    def prepare_for_replay(self, batch: Batch) -> None:
        static, kept = self._static[batch.padded_reqs], self._static[batch.padded_reqs].prefix.clone()
        super().prepare_for_replay(batch)
        if self.broken and batch.padded_reqs in self._planned:
            static.prefix.copy_(kept)
        self._planned.add(batch.padded_reqs)


class MaxLengthFrozen(TorchSoftmax):
    """The longest length bounds the keys as a Python number, which a capture freezes."""

    broken: bool

    def prepare_for_capture(self, batch: Batch) -> None:
        super().prepare_for_capture(batch)
        self._longest = max(batch.kv_lens)

    def prepare_for_replay(self, batch: Batch) -> None:
        super().prepare_for_replay(batch)
        self._longest = max(batch.kv_lens)

    def _forward_uniform(self, q: Tensor, layer: int, batch: Batch, meta: UniformMetadata) -> Tensor:
        if self.broken:
            meta = replace(meta, slots=meta.slots[:, : self._longest])
        return super()._forward_uniform(q, layer, batch, meta)


class LastCapturedRefreshed(TorchSoftmax):
    """Every replay refreshes the lengths of the size captured last, whatever size it replays."""

    broken: bool

    def prepare_for_capture(self, batch: Batch) -> None:
        super().prepare_for_capture(batch)
        self._last = batch.attn_metadata

    def prepare_for_replay(self, batch: Batch) -> None:
        fresh = batch.attn_metadata
        static = self._static[batch.padded_reqs]
        kept = static.prefix.clone()
        super().prepare_for_replay(batch)
        if self.broken:
            static.prefix.copy_(kept)
            rows = min(len(fresh.prefix), len(self._last.prefix))
            self._last.prefix[:rows].copy_(fresh.prefix[:rows])


class MaskNotRefreshed(TorchSoftmax):
    """The tree mask of the capture serves every replay."""

    broken: bool

    def prepare_for_replay(self, batch: Batch) -> None:
        static = self._static[batch.padded_reqs]
        kept = static.ancestors.clone()
        super().prepare_for_replay(batch)
        if self.broken:
            static.ancestors.copy_(kept)


class MaskOfTheFirstReplay(MaskNotRefreshed):
    """The tree mask is filled once, with the first replay's trees."""

    def prepare_for_replay(self, batch: Batch) -> None:
        broken = self.broken
        self.broken = broken and getattr(self, "_filled", False)
        super().prepare_for_replay(batch)
        self.broken, self._filled = broken, True


class CaptureLeavesNaN(TorchSoftmax):
    """The capture's lengths are never filled in: a softmax over nothing."""

    broken: bool

    def prepare_for_capture(self, batch: Batch) -> None:
        super().prepare_for_capture(batch)
        batch.attn_metadata.prefix.fill_(-1 if self.broken else 0)


CG_DECODE, VERIFY_CG = RunnerMode.CG_DECODE, RunnerMode.VERIFY_CG
FAULTS = (
    (LengthsOnTheHost, "CaptureError.*tolist", CG_DECODE, DECODE),
    (EagerTableRefreshed, "out of layer", CG_DECODE, DECODE),
    (LengthsRebound, "out of layer", CG_DECODE, DECODE),
    (PlanMadeOnce, "out of layer", CG_DECODE, DECODE),
    (MaxLengthFrozen, "out of layer", CG_DECODE, DECODE),
    (LastCapturedRefreshed, "out of layer", CG_DECODE, DECODE),
    (MaskNotRefreshed, "out of layer", VERIFY_CG, TREE),
    (MaskOfTheFirstReplay, "out of layer", VERIFY_CG, TREE),
    (CaptureLeavesNaN, "warm-up: the model's output is not finite", CG_DECODE, DECODE.but(soft_cap=5.0)),
)


@pytest.mark.parametrize(("backend", "finding", "mode", "case"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_it_is_red(outcome: Outcome, backend: type[AttentionBackend], finding: str, mode: RunnerMode, case: Case) -> None:
    result = outcome(backend, True, mode, case)
    assert result.status == "fail"
    assert re.search(finding, "\n".join(result.details)), result.details


@pytest.mark.parametrize(("backend", "finding", "mode", "case"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_without_the_change_it_is_green(
    outcome: Outcome, backend: type[AttentionBackend], finding: str, mode: RunnerMode, case: Case
) -> None:
    result = outcome(backend, False, mode, case)
    assert result.status == "pass", result.details
