"""ALiBi slopes as literal numbers, and the layer rule of Lightning's decay rates."""

from __future__ import annotations

import pytest
import torch

from attnmatrix.references.slopes import alibi_slopes, lightning_slopes

EIGHT = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
LITERAL = {
    1: [0.00390625],
    2: [0.0625, 0.00390625],
    3: [0.0625, 0.00390625, 0.25],
    4: [0.25, 0.0625, 0.015625, 0.00390625],
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    8: EIGHT,
    12: [*EIGHT, 0.7071067811865476, 0.35355339059327379, 0.17677669529663689, 0.088388347648318447],
}


@pytest.mark.parametrize("heads", LITERAL)
def test_literal_slopes(heads: int) -> None:
    slopes = alibi_slopes(heads)
    assert slopes.dtype is torch.float64
    assert slopes.tolist() == pytest.approx(LITERAL[heads], rel=1e-14)


@pytest.mark.parametrize("heads", [*range(1, 65), 96, 128])
def test_as_many_slopes_as_heads_all_different_and_decaying(heads: int) -> None:
    slopes = alibi_slopes(heads).tolist()
    assert len(slopes) == len(set(slopes)) == heads
    assert all(0 < slope < 1 for slope in slopes)


@pytest.mark.parametrize(
    ("layer", "layers", "factor"),
    [(0, 1, 1.00001), (0, 2, 1.00001), (1, 2, 0.00001), (0, 5, 1.00001), (1, 5, 0.75001), (2, 5, 0.50001), (4, 5, 0.00001)],
)
def test_the_layer_rule(layer: int, layers: int, factor: float) -> None:
    assert lightning_slopes(2, layer, layers).tolist() == pytest.approx([0.0625 * factor, 0.00390625 * factor], rel=1e-12)
