"""Rows that are wrong beyond some size, or where some options meet: each is red on a case made for it, and green below."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from wrong_sight import Seeing, Sees, first_drafts, keys_of, status

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.context import Context

EAGER, VERIFY, SOFTMAX = RunnerMode.EAGER, RunnerMode.VERIFY, AttentionKind.SOFTMAX


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


def draft_rows(context: Context, visible: Tensor, layer: int) -> Tensor:
    """Rows of queries past the 128th of a key head lose the first key."""
    visible[:, -(-128 // context.heads.group) :, 0] = False
    return visible


def many_draft_requests(context: Context, visible: Tensor, layer: int) -> Tensor:
    """Requests past the 32nd see what the first one's see."""
    visible[32:] = visible[:1]
    return visible


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
