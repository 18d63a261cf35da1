"""Mistakes planted into the adapter of ``sgl-triton`` turn its cells red: what the kernels are given is what is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backends.sgl_triton import Rail, SglTriton
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.trial import Trial, run_trial

DECODE = "decode-p16-prefix14.40-new1.1-h2x1x64-fp32-shuffled"
TREE = "target_verify-p16-prefix14.31-new3.3-h2x1x64-fp32-shuffled-treer.0.0-eagle"
WINDOW = "decode-p16-prefix9.21-new1.1-h2x1x64-fp32-shuffled-w8"
EXTEND = "extend-p16-prefix0.20-new5.3-h2x1x64-fp32-shuffled"


class KeepsOldIndices(SglTriton):
    def prepare_for_replay(self, batch: Batch) -> None:
        for rail in batch.attn_metadata.rails.values():
            rail.kv_indices = self._static[batch.padded_reqs].rails[None].kv_indices.clone()
        super().prepare_for_replay(batch)


class KeepsOldLengths(SglTriton):
    def prepare_for_replay(self, batch: Batch) -> None:
        for window, rail in batch.attn_metadata.rails.items():
            rail.kv_indptr = self._static[batch.padded_reqs].rails[window].kv_indptr.clone()
        super().prepare_for_replay(batch)


class KeepsOldMask(SglTriton):
    def prepare_for_replay(self, batch: Batch) -> None:
        batch.attn_metadata.mask = torch.ones_like(batch.attn_metadata.mask)
        super().prepare_for_replay(batch)


class TakesDraftsForAChain(SglTriton):
    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        batch.attn_metadata.mask = batch.attn_metadata.mask_indptr = None


class ForgetsTheOwnKey(SglTriton):
    """As sglang 0.5.23's own backend does: a window that excludes the query's key, of which decode takes that many keys in all."""

    def _rail(self, batch: Batch, prefix: torch.Tensor, window: int | None) -> Rail:
        return super()._rail(batch, prefix, None if window is None else window - 1)


class ReadsAnotherPage(SglTriton):
    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        for rail in batch.attn_metadata.rails.values():
            rail.kv_indices //= self.context.page_size
            rail.kv_indices *= self.context.page_size


def trial(create: Callable[..., SglTriton], mode: RunnerMode, case: str, device: torch.device) -> Trial:
    row = replace(find_row("sgl-triton", AttentionKind.SOFTMAX), create=create)
    if row.missing:
        pytest.skip("sglang is not installed")
    return run_trial(row, mode, parse_case(case), device, PEAKED)


MISTAKES = (
    (KeepsOldIndices, RunnerMode.CG_DECODE, DECODE),
    (KeepsOldLengths, RunnerMode.CG_DECODE, DECODE),
    (KeepsOldMask, RunnerMode.VERIFY_CG, TREE),
    (TakesDraftsForAChain, RunnerMode.VERIFY, TREE),
    (ForgetsTheOwnKey, RunnerMode.EAGER, WINDOW),
    (ReadsAnotherPage, RunnerMode.PCG_EXTEND, EXTEND),
)


@pytest.mark.parametrize(("create", "mode", "case"), MISTAKES)
def test_a_planted_mistake_is_red(create: Callable[..., SglTriton], mode: RunnerMode, case: str, device: torch.device) -> None:
    found = trial(create, mode, case, device)
    assert found.error is None, found.error
    assert not found.passed


@pytest.mark.parametrize(("mode", "case"), dict.fromkeys((mode, case) for _, mode, case in MISTAKES))
def test_the_same_cells_are_green_without_it(mode: RunnerMode, case: str, device: torch.device) -> None:
    found = trial(SglTriton, mode, case, device)
    assert found.passed, found.error
