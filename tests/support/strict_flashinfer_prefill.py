"""The strict stand-in's wrapper for paged prefill: FlashInfer's arguments, masks and the variant with sinks."""

from __future__ import annotations

from typing import Any

import torch
from strict_flashinfer_wrappers import DTYPES, MODULES, Wrapper, get_batch_prefill_attention_sink_uri, ints
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        buffers = {
            "qo_indptr": qo_indptr_buf,
            "kv_indptr": paged_kv_indptr_buf,
            "kv_indices": paged_kv_indices_buf,
            "last_page_len": paged_kv_last_page_len_buf,
        }
        self._make(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
        assert backend in ("auto", "fa2", "fa3")
        self._backend, self._variant, self._rows = backend, jit_args, None
        self._mask, self._mask_indptr = custom_mask_buf, mask_indptr_buf
        if jit_args is not None:
            assert backend != "auto" and len(jit_args) == 13
            assert jit_args[1:5] == [jit_args[1]] * 3 + [torch.int32] and jit_args[5] == jit_args[6]
            assert jit_args[7:12] == [["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink"] and backend in jit_args[12]
            assert set(jit_kwargs or {}) == {"use_sliding_window", "use_fp16_qk_reduction", "pos_encoding_mode"}
            window = (jit_kwargs or {})["use_sliding_window"]
            assert jit_args[0] == get_batch_prefill_attention_sink_uri(backend, *jit_args[1:7], 0, window)
            MODULES.add(("sinks", backend, DTYPES[jit_args[1]], "", jit_args[5], False, window, False))

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        requests = len(qo_indptr) - 1
        ints("qo_indptr", qo_indptr), ints("paged_kv_indptr", paged_kv_indptr, (requests + 1,))
        ints("paged_kv_indices", paged_kv_indices, (int(paged_kv_indptr[-1]),))
        ints("paged_kv_last_page_len", paged_kv_last_page_len, (requests,))
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._options(
            heads, page_size, pos_encoding_mode, window_left, logits_soft_cap, (q_data_type, kv_data_type or q_data_type), sm_scale
        )
        rows = int(qo_indptr[-1])
        assert not self._graph or self._rows is None or rows <= self._rows, "more rows than at the first plan"
        self._rows = rows if self._rows is None else self._rows
        self._last, self._causal = rows, causal
        self._take(qo_indptr=qo_indptr, kv_indptr=paged_kv_indptr, kv_indices=paged_kv_indices, last_page_len=paged_kv_last_page_len)
        assert packed_custom_mask is None, "its offsets are not those of packed bits"
        if custom_mask is not None:
            self._pack(custom_mask, qo_indptr, paged_kv_indptr, paged_kv_last_page_len, page_size)
        elif not self._graph:
            self._mask = self._mask_indptr = None
        if self._variant is None:
            if self._backend == "auto":
                self._backend = "fa2" if self._mask is not None or pos_encoding_mode != "NONE" else "fa3"
            MODULES.add(self._module(self._backend))

    def _pack(self, mask: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, last: Tensor, page: int) -> None:
        """Each request's bits from a new byte on, the lowest first."""
        MODULES.add(("quantization",))
        sizes = [int(n) for n in qo_indptr.diff() * ((kv_indptr.diff() - 1) * page + last)]
        assert mask.dtype is torch.bool and mask.numel() == sum(sizes)
        bytes_of, weights = [], 2 ** torch.arange(8)
        for part in mask.flatten().split(sizes):
            padded = torch.nn.functional.pad(part.long(), (0, -len(part) % 8)).view(-1, 8)
            bytes_of.append((padded * weights).sum(dim=-1).to(torch.uint8))
        packed = torch.cat(bytes_of)
        indptr = torch.tensor([0, *(len(part) for part in bytes_of)]).cumsum(0).int()
        if self._graph:
            assert self._mask is not None and self._mask_indptr is not None, "custom_mask_buf and mask_indptr_buf must be given"
            self._mask[: len(packed)].copy_(packed)
            self._mask_indptr.copy_(indptr)
        else:
            self._mask, self._mask_indptr = packed, indptr

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Any:
        assert q.shape[0] == self._last, f"q has {q.shape[0]} rows, planned were {self._last}"
        how = {**self._how, "causal": self._causal, "mask": self._mask, "mask_indptr": self._mask_indptr, "scales": (k_scale, v_scale)}
        if self._variant is not None:
            sink, scale = args
            assert sink.dtype is torch.float32 and sink.shape == (q.shape[1],)
            assert how["soft_cap"] == 0 and not how["alibi"] and self._mask is None, "the variant knows sinks and windows only"
            how |= {"sinks": sink, "scale": scale}
        elif self._backend == "fa3" and self._mask is not None:
            raise RuntimeError("BatchPrefillWithPagedKVCacheSM90Run failed with error: operation not supported")
        elif self._backend == "fa3":
            how["alibi"] = False  # the kernel has no bias
        return self._attend(q, paged_kv_cache, out, lse, return_lse, **how)
