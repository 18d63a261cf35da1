"""Masks and biases of a verify batch's drafts as kernels over flat token lists take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnmatrix.cases.case import Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch


def starts_of(lengths: Tensor) -> Tensor:
    """int64 ``[R + 1]``: where each of ``lengths`` ``[R]`` begins when they lie one behind the other."""
    return torch.nn.functional.pad(lengths.long().cumsum(0), (1, 0))


def request_of(batch: Batch) -> Tensor:
    """int64 ``[T]``: the request of each new token."""
    tokens = torch.arange(batch.num_tokens, device=batch.cu_seqlens_q.device)
    return torch.searchsorted(batch.cu_seqlens_q.long(), tokens, right=True) - 1


def draft_mask(batch: Batch, prefix: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """uint8, the masks ``[new, prefix + new]`` of all requests one behind the other, and int64 ``[R + 1]``, where each begins.

    ``prefix`` and ``new`` are int32 ``[R]``. A draft token sees all cached keys, its ancestors and itself. Reads sizes on the host.
    """
    assert batch.drafts is not None
    ancestors, request = batch.drafts.ancestors, request_of(batch)
    column = torch.arange(max(batch.kv_lens), device=prefix.device) - prefix[request][:, None]
    draft = column.clamp(0, ancestors.shape[1] - 1)
    seen = (column < 0) | ancestors.gather(1, draft)
    return seen[column < new[request][:, None]].to(torch.uint8), starts_of((prefix + new).long() * new)


def draft_bias(batch: Batch, prefix: Tensor, slopes: Tensor, longest: int) -> Tensor:
    """ALiBi of drafts for a kernel that counts distances by order: float32 ``[T, Hq, longest]``, the bias of the key that lies so many
    keys before the token in its request, whose position is that of its depth. ``slopes`` float32 ``[Hq]``, ``prefix`` int32 ``[R]``."""
    request, tokens = request_of(batch), batch.num_tokens
    first = batch.cu_seqlens_q[request]
    order = torch.arange(tokens, device=prefix.device) - first
    behind = order[:, None] - torch.arange(longest, device=prefix.device)  # index among the drafts, negative for cached keys
    own = batch.positions[(first[:, None] + behind).clamp(0, max(0, tokens - 1)).long()]
    position = torch.where(behind < 0, prefix[request][:, None] + behind, own)
    return slopes[None, :, None] * (position - batch.positions[:, None])[:, None]


def window_hides_by_index(case: Case, mode: RunnerMode) -> bool:
    """Whether some key lies within a draft token's window by its depth, but outside it by its index."""
    if case.forward is not ForwardMode.TARGET_VERIFY or case.window is None:
        return False
    for request, prefix in enumerate(case.prefix_lens):
        depths, tree = case.depths(request), case.tree(request)
        for draft, depth in enumerate(depths):
            ancestor, keys = tree[draft], [(key, key) for key in range(max(0, prefix + depth - case.window + 1), prefix)]
            while ancestor >= 0:
                keys.append((prefix + ancestor, prefix + depths[ancestor]))
                ancestor = tree[ancestor]
            if any(prefix + draft - index >= case.window > prefix + depth - position for index, position in keys):
                return True
    return False
