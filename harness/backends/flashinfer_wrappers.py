"""FlashInfer's wrappers for paged prefill and decode, planned once per batch: the backend of the rows in ``flashinfer.py``.

A wrapper keeps its plan in workspaces of its own, so each batch and each window among the layers has one. The float workspace, which
holds partial results between two kernels of one call, is shared: calls follow one another on one stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from attnmatrix.cases.case import ForwardMode
from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.backends.flashinfer_lists import PagedLists, kernel_window, paged_lists, tree_mask
from attnmatrix.harness.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch
    from attnmatrix.harness.context import Context

PACKAGE = "flashinfer-python"
FLOAT_WORKSPACE = 256 << 20  # bytes; the package asks for 128 MiB, its graphs of many heads for more
CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)  # query heads per key head that the package's CUDA-core decode is compiled for


@dataclass(frozen=True)
class Choice:
    """Which of the package's kernels a row asks for. ``decode_backend`` and ``cuda_cores`` are for decode batches."""

    layout: str
    prefill_backend: str
    decode_backend: str
    cuda_cores: bool = False

    def tensor_cores(self, group: int) -> bool:
        """Whether decode runs on tensor cores: always, but for the row that asks for CUDA cores, where they take the GQA ratio."""
        return not (self.cuda_cores and group in CUDA_CORE_GROUPS)


@dataclass
class Planned:
    """A wrapper of the package for the layers of one window. ``fixed`` are the buffers it was made with for a graph."""

    wrapper: Any
    plan: Callable[[PagedLists, Any], None]
    run: Callable[..., Any]
    masked: bool
    fixed: PagedLists | None = None


@dataclass
class FlashInferMetadata:
    lists: PagedLists
    masks: dict[int | None, Any]  # per window; on gpu; bool, see tree_mask; of target_verify batches only
    planned: dict[int | None, Planned]  # per window
    needs_mask: bool  # on cpu; whether a causal mask would be wrong

    def get_last_indices(self, bs: int) -> Tensor:
        return self.lists.qo_indptr[1 : bs + 1] - 1


@cache
def workspace(device: str, size: int = FLOAT_WORKSPACE) -> Any:
    """Zeroed bytes between canaries, one for all backends of a device that plan to the same size."""
    from attnmatrix.harness.pools import Fenced

    fenced = Fenced((size,), torch.uint8, torch.device(device))
    fenced.tensor.zero_()
    return fenced


class FlashInfer(AttentionBackend):
    """One kernel call per layer and batch over the physical pool and its page lists."""

    def __init__(self, context: Context, choice: Choice) -> None:
        super().__init__(context)
        import flashinfer

        self._package, self._choice = flashinfer, choice
        self._workspace = workspace(str(context.device))

    def prepare_metadata(self, batch: Batch) -> None:
        if self._workspace.broken():
            raise RuntimeError("a kernel wrote outside its float workspace")
        windows = dict.fromkeys(self.context.windows) if batch.num_tokens else {}
        lists = paged_lists(batch, self.context)
        masks = {window: tree_mask(batch, self.context, window) for window in windows} if batch.drafts is not None else {}
        meta = FlashInferMetadata(lists, masks, {}, batch.drafts is not None and not batch.drafts.is_chain)
        for window in windows:
            meta.planned[window] = planned = self._wrapper(batch.forward_mode, window, meta.needs_mask)
            planned.plan(lists, masks.get(window))
        batch.attn_metadata = meta

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return self._attend(q, k, v, layer_id, batch, return_lse=False)

    def forward_with_lse(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """The package's LSE is a logarithm to base 2; returned is the natural one."""
        out, lse = self._attend(q, k, v, layer_id, batch, return_lse=True)
        return out, lse * math.log(2.0)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch, return_lse: bool) -> Any:
        kv = self.context.kv
        assert kv is not None
        kv.store(layer_id, batch.out_loc, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if not batch.num_tokens:
            return (out, q.new_empty(q.shape[:2], dtype=torch.float32)) if return_lse else out
        planned = batch.attn_metadata.planned[self.context.windows[layer_id]]
        scales = {"k_scale": self.context.k_scale(layer_id), "v_scale": self.context.v_scale(layer_id)} if kv.quantised else {}
        return planned.run(q, (kv.k(layer_id), kv.v(layer_id)), out=out, return_lse=return_lse, **scales)

    def _wrapper(self, mode: ForwardMode, window: int | None, masked: bool, fixed: Fixed | None = None) -> Planned:
        if self.context.sinks is not None:
            return self._prefill(window, masked, fixed, self._sink_module(window))
        if mode is ForwardMode.DECODE:
            return self._decode(window, fixed)
        return self._prefill(window, masked, fixed, {})

    def _decode(self, window: int | None, fixed: Fixed | None) -> Planned:
        choice, heads = self._choice, self.context.heads
        buffers = {} if fixed is None else {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": fixed.lists.kv_indptr,
            "paged_kv_indices_buffer": fixed.lists.kv_indices,
            "paged_kv_last_page_len_buffer": fixed.lists.last_page_len,
        }  # fmt: skip
        wrapper = self._package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace.tensor,
            choice.layout,
            use_tensor_cores=choice.tensor_cores(heads.group),
            backend=choice.decode_backend,
            **buffers,
        )

        def plan(lists: PagedLists, mask: Any) -> None:
            wrapper.plan(
                lists.kv_indptr,
                lists.kv_indices,
                lists.last_page_len,
                heads.q,
                heads.kv,
                heads.dim,
                lists.page_size,
                **self._options(window),
            )

        return Planned(wrapper, plan, wrapper.run, False, fixed.lists if fixed else None)

    def _prefill(self, window: int | None, masked: bool, fixed: Fixed | None, module: dict[str, Any]) -> Planned:
        heads = self.context.heads
        buffers: dict[str, Any] = {} if fixed is None else {
            "use_cuda_graph": True,
            "qo_indptr_buf": fixed.lists.qo_indptr,
            "paged_kv_indptr_buf": fixed.lists.kv_indptr,
            "paged_kv_indices_buf": fixed.lists.kv_indices,
            "paged_kv_last_page_len_buf": fixed.lists.last_page_len,
        }  # fmt: skip
        if fixed is not None and masked:  # with these buffers the wrapper takes every plan for a masked one
            buffers |= {"custom_mask_buf": fixed.mask, "mask_indptr_buf": fixed.mask_indptr}
        backend = {"backend": self._choice.prefill_backend, **module}
        wrapper = self._package.BatchPrefillWithPagedKVCacheWrapper(self._workspace.tensor, self._choice.layout, **buffers, **backend)

        def plan(lists: PagedLists, mask: Any) -> None:
            seen = {"custom_mask": mask} if masked else {"causal": True}
            wrapper.plan(
                lists.qo_indptr, lists.kv_indptr, lists.kv_indices, lists.last_page_len, heads.q, heads.kv, heads.dim, lists.page_size,
                **seen, **self._options(None if masked else window),
            )  # fmt: skip

        sinks = (self.context.sinks, self.context.scale) if module else ()
        return Planned(wrapper, plan, partial(_run, wrapper, sinks), masked, fixed.lists if fixed else None)

    def _options(self, window: int | None) -> dict[str, Any]:
        """What both plans take; the package makes ALiBi's slopes itself, from the number of heads."""
        context = self.context
        assert context.kv is not None
        return {
            "pos_encoding_mode": "NONE" if context.alibi_slopes is None else "ALIBI",
            "window_left": kernel_window(window),
            "logits_soft_cap": context.soft_cap,
            "q_data_type": context.dtype,
            "kv_data_type": context.kv.dtype,
            "sm_scale": context.scale,
        }

    def _sink_module(self, window: int | None) -> dict[str, Any]:
        """The package's variant with sinks under the package's own name for it. ``BatchAttentionWithAttentionSinkWrapper`` gives all head
        dims one name, so that each would be compiled over the other."""
        from flashinfer.jit.attention import get_batch_prefill_attention_sink_uri
        from flashinfer.jit.attention.variants import attention_sink_decl
        from flashinfer.utils import determine_attention_backend

        context, backend = self.context, self._choice.prefill_backend
        assert context.kv is not None
        q_dtype, kv_dtype, dim = context.dtype, context.kv.dtype, context.heads.dim
        if backend == "auto":
            backend = determine_attention_backend(self._workspace.tensor.device, 0, False, False, q_dtype, kv_dtype)
        types = (q_dtype, kv_dtype, q_dtype, torch.int32, dim, dim)
        name = get_batch_prefill_attention_sink_uri(backend, *types, 0, window is not None)
        variant = (["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", attention_sink_decl[backend])
        options = {"use_sliding_window": window is not None, "use_fp16_qk_reduction": False, "pos_encoding_mode": 0}
        return {"backend": backend, "jit_args": [name, *types, *variant], "jit_kwargs": options}

    def inspect_metadata(self, batch: Batch) -> PreparedMetadata:
        lists = batch.attn_metadata.lists
        return PreparedMetadata(
            cu_seqlens_q=lists.qo_indptr,
            cache_seqlens=lists.kv_lens,
            kv_indptr=lists.kv_indptr,
            kv_indices=lists.kv_indices,
            last_indices=batch.attn_metadata.get_last_indices(batch.size),
        )

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        self._fixed = {size: {window: Fixed.of(self.context, size) for window in self.context.windows} for size in batch_sizes}
        self._static: dict[int, FlashInferMetadata] = {}

    def prepare_for_capture(self, batch: Batch) -> None:
        """The wrappers of a graph, planned for the batch it is captured on."""
        rows = batch.padded_reqs
        self.prepare_metadata(batch)
        mode, masked = batch.forward_mode, batch.attn_metadata.needs_mask
        captured = {window: self._wrapper(mode, window, masked, fixed) for window, fixed in self._fixed[rows].items()}
        self._refresh(rows, captured, batch)

    def prepare_for_replay(self, batch: Batch) -> None:
        """Plans the captured wrappers anew: that writes the lists and the plan into the buffers that the graph reads."""
        self._refresh(batch.padded_reqs, self._static[batch.padded_reqs].planned, batch)

    def _refresh(self, rows: int, captured: dict[int | None, Planned], batch: Batch) -> None:
        fresh: FlashInferMetadata = batch.attn_metadata
        if fresh.needs_mask and not all(planned.masked for planned in captured.values()):
            raise ValueError("the graph was captured for chains, with a causal mask, and the batch has draft trees")
        for window, planned in captured.items():
            planned.plan(fresh.lists, fresh.masks.get(window))
            assert planned.fixed is not None
            planned.fixed.qo_indptr.copy_(fresh.lists.qo_indptr)  # decode wrappers take none
        shown = next(planned.fixed for planned in captured.values() if planned.fixed is not None)
        self._static[rows] = batch.attn_metadata = FlashInferMetadata(shown, fresh.masks, captured, fresh.needs_mask)


@dataclass(frozen=True)
class Fixed:
    """The buffers of one captured wrapper. ``mask`` holds bits, eight to a byte, each request's from a new byte on."""

    lists: PagedLists
    mask: Tensor  # on gpu; uint8
    mask_indptr: Tensor  # on gpu; int32 [R + 1]

    @classmethod
    def of(cls, context: Context, rows: int) -> Fixed:
        """Buffers for ``rows`` requests of any length."""
        ints = partial(torch.zeros, dtype=torch.int32, device=context.device)
        lists = PagedLists(ints(rows + 1), ints(rows + 1), ints(rows * context.pages_per_request), ints(rows), context.page_size)
        bits = context.tokens_per_request * context.pages_per_request * context.page_size
        return cls(lists, torch.zeros(rows * -(-bits // 8), dtype=torch.uint8, device=context.device), ints(rows + 1))


def _run(wrapper: Any, sinks: tuple[Any, ...], q: Tensor, cache: tuple[Tensor, Tensor], **options: Any) -> Any:
    return wrapper.run(q, cache, *sinks, **options)
