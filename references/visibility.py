"""Which keys each new token of a request may see."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case


def query_positions(case: Case, request: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 ``[new]``: position of each new token: prefix length plus its depth in the draft tree (chains: its index)."""
    return torch.tensor(case.depths(request), dtype=torch.int64, device=device) + case.prefix_lens[request]


def key_positions(case: Case, request: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 ``[kv]``: position of each key, cached prefix first, then the new tokens."""
    prefix = torch.arange(case.prefix_lens[request], dtype=torch.int64, device=device)
    return torch.cat([prefix, query_positions(case, request, device)])


def visible_keys(case: Case, request: int, layer: int, device: torch.device | str = "cpu") -> Tensor:
    """bool ``[new, kv]``: True where a new token (row) may see a key (column).

    Every cached key is visible, and of the new keys the token itself and its ancestors (in a chain: the ones before
    it, so the causal mask is aligned bottom-right). A window of w leaves the keys whose position is at most w - 1 below
    the query's own.
    """
    prefix, new = case.prefix_lens[request], case.new_lens[request]
    mask = torch.zeros(new, prefix + new, dtype=torch.bool)
    mask[:, :prefix] = True
    for row, parent in enumerate(case.tree(request)):
        if parent >= 0:
            mask[row, prefix:] = mask[parent, prefix:]
        mask[row, prefix + row] = True
    mask = mask.to(device)
    window = case.layer_window(layer)
    if window is not None:
        distance = query_positions(case, request, device)[:, None] - key_positions(case, request, device)[None, :]
        mask &= distance < window
    return mask
