"""Rows that are wrong beyond some size, or where some options meet: each is red on a case made for it, and green below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from named_cases import case_named
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Heads
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.cell import run_cell
from attnmatrix.harness.context import Context
from attnmatrix.harness.registry import Row

EAGER, VERIFY, SOFTMAX = RunnerMode.EAGER, RunnerMode.VERIFY, AttentionKind.SOFTMAX
Sees = Callable[[Context, Tensor, int], Tensor]
"""``(context, visible [R, new, keys], layer)`` to what is seen instead."""


class Seeing(TorchSoftmax):
    """The torch row, which sees what ``sees`` says."""

    def __init__(self, context: Context, sees: Sees) -> None:
        super().__init__(context)
        self.sees = sees

    def _attend(self, q: Tensor, slots: Tensor, visible: Tensor, distance: Tensor, layer: int) -> Tensor:
        return super()._attend(q, slots, self.sees(self.context, visible.clone(), layer), distance, layer)


class RefusesNothing(TorchSoftmax):
    """An empty grid of one block for each request."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        if batch.new_lens and not batch.num_tokens:
            raise RuntimeError("empty grid")
        return super().forward(q, k, v, layer_id, batch)


class GroupOf(TorchSoftmax):
    """Query heads of some groups taken in reverse."""

    def _attend(self, q: Tensor, slots: Tensor, visible: Tensor, distance: Tensor, layer: int) -> Tensor:
        odd = self.context.heads.group in (6, 9, 10)
        return super()._attend(q.flip(2) if odd else q, slots, visible, distance, layer)


def keys_of(visible: Tensor) -> int:
    return int(visible.any(dim=1).sum(dim=-1).max())


def first_drafts(visible: Tensor) -> list[int]:
    """Of each request, the index of its first draft token among its keys: that token sees the prefix and itself."""
    return [int(row[0].sum()) - 1 for row in visible]


def small_pages(context: Context, visible: Tensor, layer: int) -> Tensor:
    """One key left out of every 128 of long contexts, over pages of 1 and 32."""
    if context.page_size in (1, 32) and keys_of(visible) > 200:
        visible[..., 128] = False
    return visible


def later_chunk(context: Context, visible: Tensor, layer: int) -> Tensor:
    """The second tile of a chunk behind a long prefix loses a key of its own."""
    prefix = keys_of(visible) - visible.shape[1]
    if prefix >= 512 and visible.shape[1] > 32:
        visible[:, 33:, prefix + 32] = False
    return visible


def exact_split(context: Context, visible: Tensor, layer: int) -> Tensor:
    """A number of keys that splits divide evenly."""
    counts = visible.any(dim=1).sum(dim=-1)
    for row, count in enumerate(counts.tolist()):
        if count and count % 2048 == 0:
            visible[row, :, count - 1] = False
    return visible


def many_new(context: Context, visible: Tensor, layer: int) -> Tensor:
    """New tokens past the 1,024th lose the first key."""
    visible[:, 1024:, 0] = False
    return visible


def many_requests(context: Context, visible: Tensor, layer: int) -> Tensor:
    """Requests past the 96th see what the 96th sees."""
    visible[96:] = visible[95:96]
    return visible


def draft_requests(context: Context, visible: Tensor, layer: int) -> Tensor:
    """Drafts of requests past the eighth see what the first one's see."""
    visible[8:] = visible[:1]
    return visible


def word_of_mask(context: Context, visible: Tensor, layer: int) -> Tensor:
    """Bits of a mask past the 32nd read from its first word."""
    new = visible.shape[1]
    if new > 32:
        for row, prefix in enumerate(first_drafts(visible)):
            visible[row, :, prefix + 32 : prefix + new] = visible[row, :, prefix : prefix + new - 32]
    return visible


def deep_siblings(context: Context, visible: Tensor, layer: int) -> Tensor:
    """Drafts with the same parent at depth 3 or more see each other."""
    if visible.shape[1] == 7:
        for row, prefix in enumerate(first_drafts(visible)):
            visible[row, 4, prefix + 3] = True
    return visible


def tree_beside_window_and_fp8(context: Context, visible: Tensor, layer: int) -> Tensor:
    """A causal mask in place of the tree's where a window and an fp8 cache meet."""
    if context.kv is not None and context.kv.quantised and context.windows[layer] is not None:
        new = visible.shape[1]
        for row, prefix in enumerate(first_drafts(visible)):
            visible[row, :, prefix : prefix + new] = torch.ones(new, new, dtype=torch.bool).tril()
    return visible


def beyond_512(of: Callable[[Context, Tensor], bool]) -> Sees:
    """More than 512 keys, in the contexts or batches that ``of`` picks, lose one of every 64 of the first half."""

    def sees(context: Context, visible: Tensor, layer: int) -> Tensor:
        if of(context, visible) and keys_of(visible) > 512:
            visible[..., 60 : keys_of(visible) // 2 : 64] = False
        return visible

    return sees


def draft_rows(context: Context, visible: Tensor, layer: int) -> Tensor:
    """Rows of queries past the 128th of a key head lose the first key."""
    visible[:, -(-128 // context.heads.group) :, 0] = False
    return visible


def many_draft_requests(context: Context, visible: Tensor, layer: int) -> Tensor:
    """Requests past the 32nd see what the first one's see."""
    visible[32:] = visible[:1]
    return visible


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


SEEING: tuple[tuple[Sees, RunnerMode, str, str], ...] = (
    (small_pages, EAGER, "page1_context300_extend", "page1_decode"),
    (small_pages, EAGER, "page1_context1100_decode", "page1_decode"),
    (small_pages, EAGER, "page32_context1500_decode", "page1_decode"),
    (later_chunk, EAGER, "chunk_behind_600_extend", "context4000_extend"),
    (later_chunk, EAGER, "chunk_behind_2000_extend", "context4000_extend"),
    (exact_split, EAGER, "exact4096_decode", "context4000_decode"),
    (exact_split, EAGER, "exact2048_extend", "context4000_extend"),
    (many_new, EAGER, "chunk1100_extend", "chunk700_extend"),
    (many_requests, EAGER, "requests100_decode", "requests65_decode"),
    (draft_requests, VERIFY, "requests12_chain", "chain_eagle"),
    (word_of_mask, VERIFY, "tree_forty", "tree_siblings"),
    (deep_siblings, VERIFY, "tree_deep_siblings", "tree_siblings"),
    (draft_rows, VERIFY, "group16_chain", "chain_eagle"),
    (many_draft_requests, VERIFY, "requests40_chain", "requests12_chain"),
    (tree_beside_window_and_fp8, VERIFY, "window_fp8_tree", "fp8_tree"),
)


def status(create: Callable[[Context], AttentionBackend], mode: RunnerMode, name: str) -> str:
    row = Row("wrong", SOFTMAX, create, source=__file__)
    return run_cell(row, mode, case_named(name, SOFTMAX, mode), torch.device("cpu"), controls=(), diagnosed=False).status


@pytest.mark.parametrize(("sees", "mode", "name", "below"), SEEING, ids=[f"{s[0].__name__}-{s[2]}" for s in SEEING])
def test_what_is_seen_wrongly_beyond_a_size_is_red(sees: Sees, mode: RunnerMode, name: str, below: str) -> None:
    assert status(lambda context: Seeing(context, sees), mode, name) == "fail", sees.__doc__
    assert status(lambda context: Seeing(context, sees), mode, below) == "pass"


@pytest.mark.parametrize("name", ["window_sinks_fp8_extend", "window_sinks_fp8_decode"])
def test_sinks_left_out_beside_a_window_and_an_fp8_cache_are_red(name: str) -> None:
    def create(context: Context) -> AttentionBackend:
        drop = context.kv is not None and context.kv.quantised and any(context.windows)
        return TorchSoftmax(replace(context, sinks=None) if drop else context)

    assert status(create, EAGER, name) == "fail"


@pytest.mark.parametrize("name", ["window2048_decode", "window2048_extend"])
def test_a_window_cut_to_1024_is_red(name: str) -> None:
    def create(context: Context) -> AttentionBackend:
        return TorchSoftmax(replace(context, windows=tuple(w if w is None else min(w, 1024) for w in context.windows)))

    assert status(create, EAGER, name) == "fail"
    assert status(create, EAGER, "window1024_decode") == "pass"


@pytest.mark.parametrize("name", ["group6_extend", "group9_decode", "group10_extend"])
def test_a_group_that_is_no_power_of_two_is_met(name: str) -> None:
    assert status(GroupOf, EAGER, name) == "fail"
    assert status(GroupOf, EAGER, "group12_decode") == "pass"


def test_a_batch_without_a_new_token_is_met() -> None:
    assert status(RefusesNothing, EAGER, "no_new_tokens") == "fail"
    assert status(RefusesNothing, EAGER, "zero_length_row_last") == "pass"
