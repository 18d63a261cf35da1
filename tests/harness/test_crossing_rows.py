"""Rows that are wrong where an option, a head group or a count meets a long context or a tree: each is red on a case made for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from wrong_sight import Seeing, Sees, first_drafts, keys_of, status

from attnmatrix.cases.case import Heads
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.context import Context

EAGER, VERIFY = RunnerMode.EAGER, RunnerMode.VERIFY


def beyond_512(of: Callable[[Context, Tensor], bool]) -> Sees:
    """More than 512 keys, in the contexts or batches that ``of`` picks, lose one of every 64 of the first half."""

    def sees(context: Context, visible: Tensor, layer: int) -> Tensor:
        if of(context, visible) and keys_of(visible) > 512:
            visible[..., 60 : keys_of(visible) // 2 : 64] = False
        return visible

    return sees


def bushy(visible: Tensor) -> bool:
    """Whether some draft token does not see all before it."""
    new = visible.shape[1]
    return any(
        not torch.equal(row[:, prefix : prefix + new], torch.ones(new, new, dtype=torch.bool).tril())
        for row, prefix in zip(visible, first_drafts(visible), strict=True)
    )


CROSSED: tuple[tuple[str, Callable[[Context, Tensor], bool], RunnerMode, str, str], ...] = (
    ("sinks", lambda context, visible: context.sinks is not None, EAGER, "sinks_context700_decode", "context2500_decode"),
    ("soft cap", lambda context, visible: context.soft_cap is not None, EAGER, "cap30_context700_decode", "context2500_decode"),
    ("group 4", lambda context, visible: context.heads.group == 4, EAGER, "group4_context700_decode", "context2500_decode"),
    ("group 8", lambda context, visible: context.heads.group == 8, EAGER, "group8_context700_decode", "context2500_decode"),
    ("ten requests", lambda context, visible: len(visible) >= 8, EAGER, "requests10_context700_decode", "context2500_decode"),
    ("later chunk", lambda context, visible: visible.shape[1] > 512 and keys_of(visible) > visible.shape[1], EAGER,
     "chunk600_behind_600_extend", "chunk700_extend"),
    ("tree", lambda context, visible: bushy(visible), VERIFY, "tree_behind_600", "tree_siblings"),
)  # fmt: skip


@pytest.mark.parametrize(("of", "mode", "name", "below"), [entry[1:] for entry in CROSSED], ids=[entry[0] for entry in CROSSED])
def test_keys_lost_beyond_a_split_in_some_batches_are_red(
    of: Callable[[Context, Tensor], bool], mode: RunnerMode, name: str, below: str
) -> None:
    def create(context: Context) -> AttentionBackend:
        return Seeing(context, beyond_512(of))

    assert status(create, mode, name) == "fail"
    assert status(create, mode, below) == "pass"


def test_a_bias_that_counts_anew_after_1024_keys_is_red() -> None:
    class Anew(TorchSoftmax):
        def _attend(self, q: Tensor, slots: Tensor, visible: Tensor, distance: Tensor, layer: int) -> Tensor:
            return super()._attend(q, slots, visible, -(-distance % 1024), layer)

    assert status(Anew, EAGER, "alibi_context1100_decode") == "fail"
    assert status(Anew, EAGER, "context2500_decode") == "pass"


def test_scales_applied_twice_beyond_a_split_are_red() -> None:
    class Twice(TorchSoftmax):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
            out = super().forward(q, k, v, layer_id, batch)
            return out * self.context.v_scale(layer_id) if max(batch.kv_lens) > 512 else out

    assert status(Twice, EAGER, "fp8_context700_decode") == "fail"
    assert status(Twice, EAGER, "fp8_decode") == "pass"


@pytest.mark.parametrize(
    ("right", "mode", "name"),
    [
        (lambda heads, new: heads.group != 16 or new == 1, EAGER, "group16_extend"),
        (lambda heads, new: heads.group <= 16, EAGER, "group32_decode"),
        (lambda heads, new: heads.kv & (heads.kv - 1) == 0, EAGER, "kv_heads5_extend"),
        (lambda heads, new: heads.kv <= 16, EAGER, "kv_heads20_decode"),
        (lambda heads, new: heads.group != 5, VERIFY, "group5_chain"),
        (lambda heads, new: heads.group != 16, VERIFY, "group16_chain"),
    ],
)
def test_heads_in_reverse_in_some_shapes_are_red(right: Callable[[Heads, int], bool], mode: RunnerMode, name: str) -> None:
    class Reversed(TorchSoftmax):
        def _attend(self, q: Tensor, slots: Tensor, visible: Tensor, distance: Tensor, layer: int) -> Tensor:
            fine = right(self.context.heads, visible.shape[1])
            return super()._attend(q if fine else q.flip(1).flip(2), slots, visible, distance, layer)

    assert status(Reversed, mode, name) == "fail"


def test_a_window_counted_by_draft_index_is_red() -> None:
    """As sgl-triton counts it, in trees deeper in nodes than in levels."""

    def by_index(context: Context, visible: Tensor, layer: int) -> Tensor:
        window, new = context.windows[layer], visible.shape[1]
        if window is not None and window >= 16 and bushy(visible):
            apart = torch.arange(new)[:, None] - torch.arange(new)[None, :]
            for row, prefix in enumerate(first_drafts(visible)):
                visible[row, :, prefix : prefix + new] &= apart < window
        return visible

    assert status(lambda context: Seeing(context, by_index), VERIFY, "tree_window20") == "fail"
    assert status(lambda context: Seeing(context, by_index), VERIFY, "tree_window8") == "pass"
