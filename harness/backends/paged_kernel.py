"""A backend around one function that reads the physical pool through a page table. Shared by the rows of the FlashAttention family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnmatrix.cases.case import Case, ForwardMode
from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch
    from attnmatrix.harness.context import Context

UNIFORM = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)
"""Forward modes that graphs capture with one number of tokens per request."""


@dataclass
class PagedMetadata:
    """What a paged kernel is told of a batch. ``width`` is the number of tokens of every request where a mode fixes it, else None."""

    cu_seqlens_q: Tensor  # on gpu; int32 [R + 1]
    cu_seqlens_k: Tensor  # on gpu; int32 [R + 1]; sums of cache_seqlens
    cache_seqlens: Tensor  # on gpu; int32 [R]; cached and new tokens
    page_table: Tensor  # on gpu; int32 [R, pages]
    max_seqlen_q: int  # on cpu
    max_seqlen_k: int  # on cpu
    width: int | None  # on cpu

    def get_last_indices(self, bs: int) -> Tensor:
        return self.cu_seqlens_q[1 : bs + 1] - 1


Attend = Callable[["Context", "Tensor", "Tensor", "Tensor", PagedMetadata, "int | None"], "Tensor"]
"""``(context, q [T, Hq, D], keys, values: a layer's physical pool [pages, page, Hkv, D], metadata, window) -> [T, Hq, D]``.

One kernel call. ``window`` follows the row's declared convention, None is unlimited.
"""


class PagedKernel(AttentionBackend):
    """Writes the new tokens' slots, then calls ``attend`` once. Graphs read buffers of their own for each captured size."""

    def __init__(self, context: Context, attend: Attend) -> None:
        super().__init__(context)
        self._attend = attend

    def prepare_metadata(self, batch: Batch) -> None:
        size, longest = self.context.page_size, max(batch.kv_lens, default=0)
        lens = batch.seq_lens
        if batch.forward_mode.seq_lens_is_prefix:
            lens = lens + batch.cu_seqlens_q.diff()
        table = self.context.req_to_token[batch.req_pool_indices, :longest:size] // size
        uniform = batch.forward_mode in UNIFORM and len(set(batch.new_lens)) == 1
        batch.attn_metadata = PagedMetadata(
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=_starts(lens),
            cache_seqlens=lens,
            page_table=table,
            max_seqlen_q=max(batch.new_lens, default=0),
            max_seqlen_k=longest,
            width=batch.new_lens[0] if uniform else None,
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        context = self.context
        assert context.kv is not None
        context.kv.store(layer_id, batch.out_loc, k, v)
        if not batch.num_tokens:
            return torch.empty_like(q)
        keys, values = context.kv.k(layer_id), context.kv.v(layer_id)
        return self._attend(context, q, keys, values, batch.attn_metadata, context.windows[layer_id])

    def inspect_metadata(self, batch: Batch) -> PreparedMetadata:
        meta = batch.attn_metadata
        return PreparedMetadata(
            cu_seqlens_q=meta.cu_seqlens_q,
            cu_seqlens_k=meta.cu_seqlens_k,
            cache_seqlens=meta.cache_seqlens,
            page_table=meta.page_table,
            last_indices=meta.get_last_indices(batch.size),
        )

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        context, width = self.context, self.context.tokens_per_request
        self._static: dict[int, PagedMetadata] = {}
        for size in batch_sizes:
            starts = torch.arange(size + 1, dtype=torch.int32, device=context.device) * width
            self._static[size] = PagedMetadata(
                cu_seqlens_q=starts,
                cu_seqlens_k=starts.clone(),
                cache_seqlens=torch.full((size,), width, dtype=torch.int32, device=context.device),
                page_table=torch.zeros(size, context.pages_per_request, dtype=torch.int32, device=context.device),
                max_seqlen_q=width,
                max_seqlen_k=max_seq_len,  # a host number, frozen by the capture: it must bound every replay
                width=width if context.forward_mode in UNIFORM else None,
            )

    def prepare_for_capture(self, batch: Batch) -> None:
        batch.attn_metadata = self._static[batch.padded_reqs]

    def prepare_for_replay(self, batch: Batch) -> None:
        static, fresh = self._static[batch.padded_reqs], batch.attn_metadata
        static.cu_seqlens_q.copy_(fresh.cu_seqlens_q)
        static.cu_seqlens_k.copy_(fresh.cu_seqlens_k)
        static.cache_seqlens.copy_(fresh.cache_seqlens)
        static.page_table[:, : fresh.page_table.shape[1]].copy_(fresh.page_table)
        batch.attn_metadata = static


def has_tree(case: Case) -> bool:
    """Whether a request's draft tokens are no chain, so that a causal mask does not say what they see."""
    return any(case.tree(request) != tuple(range(-1, new - 1)) for request, new in enumerate(case.new_lens))


def _starts(lens: Tensor) -> Tensor:
    """int32 ``[R + 1]``: 0 and the running sums of ``lens``."""
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
    starts[1:] = lens.cumsum(0)
    return starts
