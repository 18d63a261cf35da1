"""A tree of draft tokens equals its root-to-leaf paths, each run as a chain of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.options import Tree
from attnmatrix.cases.speculative import SIBLINGS, TWO_ROOTS
from attnmatrix.references.decayed_state import DecayedStateResult, decayed_state_attention

SLOPES = torch.tensor([0.5, 0.0625], dtype=torch.float64)
FORESTS: dict[str, tuple[Tree, ...]] = {
    "siblings": (SIBLINGS,),
    "two_roots": (TWO_ROOTS,),
    "ragged": (TWO_ROOTS, (-1, -1), SIBLINGS),
    "zero_length": (SIBLINGS, (), (-1, 0, 0)),
    "all_roots": ((-1, -1, -1), (-1,)),
}


def inputs(forest: tuple[Tree, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    total = sum(len(tree) for tree in forest)
    shapes = ((total, 2, 4), (total, 2, 4), (total, 2, 3), (len(forest), 2, 4, 3))
    q, k, v, initial = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v, initial


def run(forest: tuple[Tree, ...], trees: list[Tree] | None) -> DecayedStateResult:
    lens = [len(tree) for tree in forest]
    return decayed_state_attention(*inputs(forest), SLOPES, lens, 0.5, trees=trees, keep_tokens=True)


def path_to(tree: Tree, node: int) -> list[int]:
    path = [node]
    while tree[path[0]] >= 0:
        path.insert(0, tree[path[0]])
    return path


def check_paths(forest: tuple[Tree, ...], result: DecayedStateResult) -> None:
    q, k, v, initial = inputs(forest)
    assert result.tokens is not None
    start = 0
    for request, tree in enumerate(forest):
        for leaf in set(range(len(tree))) - set(tree):
            rows = torch.tensor(path_to(tree, leaf)) + start
            chain = decayed_state_attention(q[rows], k[rows], v[rows], initial[request, None], SLOPES, [len(rows)], 0.5, keep_tokens=True)
            assert torch.allclose(result.out[rows], chain.out, rtol=1e-12, atol=1e-12), f"request {request}, leaf {leaf}"
            assert chain.tokens is not None
            assert torch.allclose(result.tokens[rows], chain.tokens, rtol=1e-12, atol=1e-12), f"request {request}, leaf {leaf}"
        start += len(tree)


@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS)
def test_every_path_is_a_chain(forest: tuple[Tree, ...]) -> None:
    check_paths(forest, run(forest, list(forest)))


@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS)
def test_a_tree_run_as_a_chain_is_caught(forest: tuple[Tree, ...]) -> None:
    with pytest.raises(AssertionError):
        check_paths(forest, run(forest, None))


def test_a_chain_given_by_its_parents_is_the_chain() -> None:
    chain = (tuple(range(-1, 5)), (-1, 0))
    given, plain = run(chain, list(chain)), run(chain, None)
    assert torch.equal(given.out, plain.out)
    assert torch.equal(given.final, plain.final)
