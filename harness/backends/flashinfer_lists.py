"""Page lists as FlashInfer's wrappers take them, and the masks of draft trees: a batch on the device, without a gather of keys."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from attnmatrix.harness.installed import installed_file
from attnmatrix.harness.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch
    from attnmatrix.harness.context import Context


@dataclass(frozen=True)
class PagedLists:
    """The pages of each request, one request after the other. A request without keys has no page and a last page of 0."""

    qo_indptr: Tensor  # on gpu; int32 [R + 1]
    kv_indptr: Tensor  # on gpu; int32 [R + 1]; in pages
    kv_indices: Tensor  # on gpu; int32 [pages of all requests]
    last_page_len: Tensor  # on gpu; int32 [R]
    page_size: int

    @property
    def kv_lens(self) -> Tensor:
        """int32 ``[R]``: the keys of each request that the lists tell of."""
        return ((self.kv_indptr.diff() - 1) * self.page_size + self.last_page_len).clamp(min=0)


def paged_lists(batch: Batch, context: Context) -> PagedLists:
    """The lists of all ``padded_reqs`` rows. How many pages a row has is known on the host, which they are is not."""
    size, device = context.page_size, context.device
    pages = [-(-length // size) for length in batch.kv_lens]
    last = [length - (count - 1) * size if count else 0 for length, count in zip(batch.kv_lens, pages, strict=True)]
    request = [row for row, count in enumerate(pages) for _ in range(count)]
    column = [number * size for count in pages for number in range(count)]
    row = batch.req_pool_indices[torch.tensor(request, dtype=torch.int64, device=device)]
    slots = context.req_to_token[row, torch.tensor(column, dtype=torch.int64, device=device)]
    return PagedLists(
        qo_indptr=_indptr(batch.new_lens, device),
        kv_indptr=_indptr(pages, device),
        kv_indices=(slots // size).int(),
        last_page_len=torch.tensor(last, dtype=torch.int32, device=device),
        page_size=size,
    )


def _indptr(counts: tuple[int, ...] | list[int], device: torch.device) -> Tensor:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return torch.tensor(starts, dtype=torch.int32, device=device)


def tree_mask(batch: Batch, context: Context, window_left: int | None) -> Tensor:
    """bool ``[sum of new * total length]``: request by request, new token by new token, which keys are seen.

    A draft token sees the cached prefix and its ancestors; with a window, those at most ``window_left`` positions before its own,
    a position in a tree being a depth. The package's own window counts keys, not depths, so it is not used beside a mask.
    """
    assert batch.drafts is not None
    device, widest = context.device, batch.drafts.ancestors.shape[1]
    rows = [(r, token) for r, new in enumerate(batch.new_lens) for token in range(new)]
    lens = torch.tensor([batch.kv_lens[r] for r, _ in rows], dtype=torch.int64, device=device)
    prefix = torch.tensor([batch.prefix_lens[r] for r, _ in rows], dtype=torch.int64, device=device)
    first = torch.tensor([index - token for index, (_, token) in enumerate(rows)], dtype=torch.int64, device=device)
    total = sum(batch.kv_lens[r] for r, _ in rows)
    token = torch.arange(len(rows), device=device).repeat_interleave(lens, output_size=total)
    column = torch.arange(total, device=device) - (lens.cumsum(0) - lens)[token]
    draft = column - prefix[token]
    seen = (draft < 0) | batch.drafts.ancestors[token, draft.clamp(0, widest - 1)]
    if window_left is not None:
        last = len(batch.positions) - 1
        position = torch.where(draft < 0, column, batch.positions[(first[token] + draft.clamp(min=0)).clamp(max=last)])
        seen &= batch.positions[token] - position <= window_left
    return seen


def kernel_window(window_left: int | None) -> int:
    """A window as the package counts it: keys before the query's own, -1 for all."""
    return -1 if window_left is None else window_left


@cache
def method_parameters(distribution: str, ending: str, owner: str, method: str) -> tuple[str, ...]:
    """Parameter names of a class's method in an installed distribution's file, read without an import. Raises LookupError when absent."""
    for node in ast.parse(installed_file(distribution, ending).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == method and not _is_overload(inner):
                    return tuple(arg.arg for arg in (*inner.args.posonlyargs, *inner.args.args, *inner.args.kwonlyargs))
    raise LookupError(f"{ending} of {distribution} defines no {owner}.{method}")


def _is_overload(node: ast.FunctionDef) -> bool:
    return any(isinstance(decorator, ast.Name) and decorator.id == "overload" for decorator in node.decorator_list)


def lacks_parameter(distribution: str, ending: str, owner: str, methods: tuple[str, ...], pattern: str) -> bool:
    """Whether no parameter of these methods has a name that matches."""
    return not any(re.search(pattern, name) for method in methods for name in method_parameters(distribution, ending, owner, method))
