"""Which keys a token sees: hand-written masks, and a second formulation over every case that is tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.suites import suite
from attnmatrix.references import visibility
from attnmatrix.references.visibility import key_positions, query_positions

VisibleKeys = Callable[..., Tensor]

EXTEND = Case(ForwardMode.EXTEND, 16, (2,), (3,), Heads(1, 1, 8))
TREE = Case(ForwardMode.TARGET_VERIFY, 16, (2,), (5,), Heads(1, 1, 8), trees=((-1, 0, 0, 1, -1),))

BY_HAND = {
    "extend": (EXTEND, ["11100", "11110", "11111"]),
    "extend_no_prefix": (EXTEND.but(prefix_lens=(0,)), ["100", "110", "111"]),
    "decode": (EXTEND.but(forward=ForwardMode.DECODE, prefix_lens=(4,), new_lens=(1,)), ["11111"]),
    "no_new_token": (EXTEND.but(new_lens=(0,)), []),
    "window1": (EXTEND.but(window=1), ["00100", "00010", "00001"]),
    "window2": (EXTEND.but(window=2), ["01100", "00110", "00011"]),
    "window5": (EXTEND.but(window=5), ["11100", "11110", "11111"]),
    "window4_edge": (EXTEND.but(window=4), ["11100", "11110", "01111"]),
    "chain": (TREE.but(trees=()), ["1110000", "1111000", "1111100", "1111110", "1111111"]),
    "tree": (TREE, ["1110000", "1111000", "1110100", "1111010", "1100001"]),
    "tree_window2": (TREE.but(window=2), ["0110000", "0011000", "0010100", "0001010", "0100001"]),
    "tree_window3": (TREE.but(window=3), ["1110000", "0111000", "0110100", "0011010", "1100001"]),
}


def check_by_hand(name: str, visible_keys: VisibleKeys) -> None:
    case, rows = BY_HAND[name]
    found = ["".join("01"[bool(seen)] for seen in row) for row in visible_keys(case, 0, 0).tolist()]
    assert found == rows, f"{name}: {found}"


def check_second_formulation(case: Case, visible_keys: VisibleKeys) -> None:
    """By repeated squaring of the parent relation, and the window by counting the keys on the path."""
    for layer in (0, 1):
        for request, (prefix, new) in enumerate(zip(case.prefix_lens, case.new_lens, strict=True)):
            step = torch.eye(prefix + new, dtype=torch.float64)
            for position in range(1, prefix):
                step[position, position - 1] = 1
            for node, parent in enumerate(case.tree(request)):
                above = prefix + parent if parent >= 0 else prefix - 1
                if above >= 0:
                    step[prefix + node, above] = 1
            path = step
            for _ in range((prefix + new).bit_length()):
                path = ((path @ path) > 0).double()
            window = case.window if layer == 0 or case.window_layers == "all" else None
            expected = path[prefix:].bool()
            if window is not None:
                depth = path.sum(dim=1)  # keys on the path from the first token: the position plus one
                expected &= depth[prefix:, None] - depth[None, :] < window
            found = visible_keys(case, request, layer)
            assert torch.equal(found, expected), f"{case.id}, request {request}, layer {layer}"


def small_cases() -> list[Case]:
    """One case for each mask that is tried on a context of at most 160 tokens."""
    masks: dict[tuple[object, ...], Case] = {}
    for mode in (RunnerMode.VERIFY, RunnerMode.EAGER):
        for case in suite(AttentionKind.SOFTMAX, mode):
            if max((0, *case.kv_lens)) <= 160:
                masks.setdefault((case.prefix_lens, case.new_lens, case.trees, case.window, case.window_layers), case)
    return list(masks.values())


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    check_by_hand(name, visibility.visible_keys)


def test_every_case_by_a_second_formulation() -> None:
    cases = small_cases()
    assert len(cases) > 40
    for case in cases:
        check_second_formulation(case, visibility.visible_keys)


def test_a_window_of_one_layer() -> None:
    case = EXTEND.but(window=1, window_layers="first")
    assert visibility.visible_keys(case, 0, 0).sum() == 3
    assert torch.equal(visibility.visible_keys(case, 0, 1), visibility.visible_keys(EXTEND, 0, 1))


def test_a_window_of_all_layers() -> None:
    assert visibility.visible_keys(EXTEND.but(window=1), 0, 1).sum() == 3


def test_each_request_has_its_own_tree() -> None:
    case = TREE.but(prefix_lens=(0, 1), new_lens=(2, 3), trees=((-1, -1), (-1, 0, 0)))
    assert visibility.visible_keys(case, 0, 0).int().tolist() == [[1, 0], [0, 1]]
    assert visibility.visible_keys(case, 1, 0).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]


def test_positions_follow_the_depth() -> None:
    assert query_positions(TREE, 0).tolist() == [2, 3, 3, 4, 2]
    assert key_positions(TREE, 0).tolist() == [0, 1, 2, 3, 3, 4, 2]
    assert query_positions(EXTEND, 0).tolist() == [2, 3, 4]


def top_left(case: Case, request: int, layer: int) -> Tensor:
    """The causal mask aligned with the first keys instead of the last."""
    prefix, new = case.prefix_lens[request], case.new_lens[request]
    mask = torch.ones(new, prefix + new).tril().bool()
    window = case.layer_window(layer)
    return mask if window is None else mask & ~torch.ones(new, prefix + new).tril(-window).bool()


def window_off_by_one(case: Case, request: int, layer: int) -> Tensor:
    wider = case if case.window is None else case.but(window=case.window + 1)
    return visibility.visible_keys(wider, request, layer)


def window_short_by_one(case: Case, request: int, layer: int) -> Tensor:
    shorter = case if case.window in (None, 1) else case.but(window=case.window - 1)
    return visibility.visible_keys(shorter, request, layer)


def window_by_row(case: Case, request: int, layer: int) -> Tensor:
    """The window counted in columns: wrong where a token's column is not its position."""
    prefix, new = case.prefix_lens[request], case.new_lens[request]
    window = case.layer_window(layer)
    mask = visibility.visible_keys(case.but(window=None, window_layers="all"), request, layer)
    return mask if window is None else mask & ~torch.ones(new, prefix + new).tril(prefix - window).bool()


def tree_as_chain(case: Case, request: int, layer: int) -> Tensor:
    return visibility.visible_keys(case.but(trees=()), request, layer)


def every_prefix_key_hidden(case: Case, request: int, layer: int) -> Tensor:
    mask = visibility.visible_keys(case, request, layer).clone()
    mask[:, : case.prefix_lens[request]] = False
    return mask


def own_key_hidden(case: Case, request: int, layer: int) -> Tensor:
    mask = visibility.visible_keys(case, request, layer).clone()
    mask[:, case.prefix_lens[request] :].fill_diagonal_(False)
    return mask


BROKEN = (top_left, window_off_by_one, window_short_by_one, window_by_row, tree_as_chain, every_prefix_key_hidden, own_key_hidden)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_mask_is_caught_by_hand(broken: VisibleKeys) -> None:
    caught = []
    for name in BY_HAND:
        try:
            check_by_hand(name, broken)
        except AssertionError:
            caught.append(name)
    assert caught


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_mask_is_caught_by_the_second_formulation(broken: VisibleKeys) -> None:
    def check_all() -> None:
        for case in small_cases():
            check_second_formulation(case, broken)

    with pytest.raises(AssertionError):
        check_all()
