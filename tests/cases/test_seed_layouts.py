"""The ten seed layouts are exactly those of the table that every backend must meet."""

from __future__ import annotations

import pytest

from attnmatrix.cases.case import AttentionKind, ForwardMode, Heads, Placement
from attnmatrix.cases.layouts import seed_layouts
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.suites import suite

TABLE = """
page_size_1                  extend  1   2,4       3,1
zero_prefix_exact_page       extend  16  0         16
zero_prefix_input_page_edges extend  16  0,0,0     15,16,17
prefix_exact_page            extend  16  16        2
total_exact_page             extend  16  8         8
cross_page_boundary          extend  16  15        2
ragged_page_boundary         extend  16  0,8,16    15,8,1
page32_cross_boundary        extend  32  31        2
decode_page_boundary         decode  16  14,15,16  1,1,1
decode_bsz1_nonzero_prefix   decode  16  7         1
"""


def lens(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


@pytest.mark.parametrize("kind", AttentionKind)
def test_the_ten_seed_layouts(kind: AttentionKind) -> None:
    expected = [line.split() for line in TABLE.strip().splitlines()]
    found = seed_layouts(kind)
    assert [case.name for case in found] == [row[0] for row in expected]
    for case, (_, forward, page, prefix, new) in zip(found, expected, strict=True):
        assert (case.forward, case.page_size) == (ForwardMode(forward), int(page)), case.name
        assert (case.prefix_lens, case.new_lens) == (lens(prefix), lens(new)), case.name
        assert (case.kind, case.placement, case.trees) == (kind, Placement.SHUFFLED, ()), case.name


def test_lightning_has_two_heads_of_dim_128_without_gqa() -> None:
    assert {case.heads for case in seed_layouts(AttentionKind.LIGHTNING)} == {Heads(2, 2, 128)}


@pytest.mark.parametrize("kind", AttentionKind)
def test_every_mode_meets_the_seed_layouts_it_can_drive(kind: AttentionKind) -> None:
    for mode in (RunnerMode.EAGER, RunnerMode.CG_DECODE, RunnerMode.PCG_EXTEND, RunnerMode.BCG_EXTEND):
        missing = [c.name for c in seed_layouts(kind) if c.forward in mode.forward_modes and c not in suite(kind, mode)]
        assert not missing, mode.value


@pytest.mark.parametrize("kind", AttentionKind)
def test_the_floor_is_not_the_goal(kind: AttentionKind) -> None:
    cases = suite(kind, RunnerMode.EAGER)
    assert {case.page_size for case in cases} == {1, 16, 32, 64, 128, 256} | ({4, 8, 512} if kind is AttentionKind.SOFTMAX else set())
    assert {case.dtype for case in cases} == {"bf16", "fp16", "fp32"}
    assert {case.placement for case in cases} == set(Placement)
    assert max(max(case.kv_lens, default=0) for case in cases) >= 4000
    mixed = [case for case in cases if case.forward is ForwardMode.MIXED]
    assert any(
        {(not prefix, new == 1) for prefix, new in zip(case.prefix_lens, case.new_lens, strict=True)}
        >= {(True, False), (False, False), (False, True)}
        for case in mixed
    ), "one mixed batch holds a prefill from scratch, a prefix hit and a decode"
    assert any(0 in case.new_lens for case in cases)
    assert any(case.batch_size == 0 for case in cases)


def test_head_geometries_of_softmax() -> None:
    shapes = {case.heads for case in suite(AttentionKind.SOFTMAX, RunnerMode.EAGER)}
    assert {shape.group for shape in shapes} >= {1, 2, 3, 4, 7, 8}
    assert {shape.dim for shape in shapes} >= {64, 80, 96, 128, 256}
    assert {(shape.q, shape.kv) for shape in shapes} >= {(28, 4), (40, 8), (64, 8)}
    assert any(shape.kv == 1 for shape in shapes)


@pytest.mark.parametrize("window", [4, 16])
@pytest.mark.parametrize("forward", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_window_edges(window: int, forward: ForwardMode) -> None:
    cases = [c for c in suite(AttentionKind.SOFTMAX, RunnerMode.EAGER) if c.window == window and c.forward is forward]
    totals = {total for case in cases for total in case.kv_lens}
    assert totals >= {window - 1, window, window + 1, window + 2}
