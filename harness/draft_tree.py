"""The draft tokens of a verify batch as the backend is given them."""

from __future__ import annotations

import torch

from attnmatrix.cases.case import Case
from attnmatrix.harness.batch import DraftTree


def draft_tree(case: Case, device: torch.device) -> DraftTree:
    """The draft tokens of a verify batch, ancestors walked parent by parent."""
    widest = max([1, *case.new_lens])
    rows: list[list[bool]] = []
    for request in range(case.batch_size):
        tree = case.tree(request)
        for node in range(len(tree)):
            seen, at = [False] * widest, node
            while at >= 0:
                seen[at] = True
                at = tree[at]
            rows.append(seen)
    trees = tuple(case.tree(request) for request in range(case.batch_size))
    ancestors = torch.tensor(rows, dtype=torch.bool, device=device).view(len(rows), widest)
    return DraftTree(trees, ancestors, case.draft_kind)
