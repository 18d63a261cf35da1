"""The strict stand-in's wrapper for paged decode: FlashInfer's arguments, on CUDA cores or tensor cores."""

from __future__ import annotations

from typing import Any

import torch
from strict_flashinfer_wrappers import MODULES, Wrapper, ints
from torch import Tensor


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        assert jit_args is None and backend in ("auto", "fa2", "fa3")
        starts = None if paged_kv_last_page_len_buffer is None else torch.arange(len(paged_kv_last_page_len_buffer) + 1, dtype=torch.int32)
        buffers = {
            "qo_indptr": starts,
            "kv_indptr": paged_kv_indptr_buffer,
            "kv_indices": paged_kv_indices_buffer,
            "last_page_len": paged_kv_last_page_len_buffer,
        }
        self._make(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
        self._tensor_cores, self._backend = use_tensor_cores, backend

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        requests = len(last_page_len)
        ints("indptr", indptr, (requests + 1,)), ints("indices", indices, (int(indptr[-1]),)), ints("last_page_len", last_page_len)
        heads = (num_qo_heads, num_kv_heads, head_dim)
        self._options(
            heads, page_size, pos_encoding_mode, window_left, logits_soft_cap, (q_data_type, kv_data_type or q_data_type), sm_scale
        )
        assert self._tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8), "Unsupported group_size"
        starts = torch.arange(requests + 1, dtype=torch.int32)
        self._take(qo_indptr=starts, kv_indptr=indptr, kv_indices=indices, last_page_len=last_page_len)
        if self._backend == "auto" and self._tensor_cores:
            self._backend = "fa2"
        module = self._module(self._backend)
        MODULES.add(module if self._tensor_cores else ("decode", "", *module[2:]))

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
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        assert not args and q.shape[0] == len(self._bufs["last_page_len"])
        how = {
            **self._how,
            "alibi": self._how["alibi"] and not (self._tensor_cores and self._backend == "fa3"),
            "scales": (k_scale, v_scale),
        }
        return self._attend(q, paged_kv_cache, out, lse, return_lse, **how)
