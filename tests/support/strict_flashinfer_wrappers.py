"""The strict stand-in's wrappers for paged prefill and decode: FlashInfer's arguments, checks and buffers, and faults of its kernels.

Attention reads the lists in the wrapper's buffers, and gives NaN where they are not those of the last plan, since the kernels walk the plan.
Not modelled: how work is split, and the package's refusals but for masks on fa3.
"""

from __future__ import annotations

from typing import Any

import torch
from strict_flashinfer_attention import attention
from torch import Tensor

MODULES: set[tuple[Any, ...]] = set()
BLOCK = 64  # dims that fa2's kernels move at a time; the package's hold anything in the rest, here it is left out of scores
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _ints(name: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    assert tensor.dtype is torch.int32, f"{name} is {tensor.dtype}"
    assert tensor.is_contiguous() and tensor.ndim == 1, f"{name} is no plain vector"
    assert shape is None or tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}, expected {shape}"
    return tensor


def get_batch_prefill_attention_sink_uri(
    backend: str, dtype_q: Any, dtype_kv: Any, dtype_o: Any, dtype_idx: Any, head_dim_qk: int, head_dim_vo: int, pos_encoding_mode: int, use_sliding_window: bool
) -> str:  # fmt: skip
    """A name that tells such modules apart."""
    return f"sinks_{backend}_{dtype_q}_{head_dim_qk}_{use_sliding_window}"


def determine_attention_backend(device: Any, pos_encoding_mode: int, use_fp16_qk_reductions: bool, use_custom_mask: bool, dtype_q: Any, dtype_kv: Any) -> str:  # fmt: skip
    """What the package takes on SM 9.0."""
    return "fa2" if use_custom_mask or pos_encoding_mode else "fa3"


class _Wrapper:
    """What the two wrappers share: workspaces, buffers fixed or not, checks of a run."""

    def _make(self, workspace: Tensor, layout: str, graph: bool, buffers: dict[str, Tensor | None]) -> None:
        assert workspace.dtype is torch.uint8 and workspace.ndim == 1 and workspace.is_contiguous()
        assert layout in ("NHD", "HND")
        self._workspace, self._layout, self._graph, self._planned = workspace, layout, graph, None
        if graph:
            assert all(tensor is not None for tensor in buffers.values()), "a graph needs every buffer"
        self._bufs: dict[str, Any] = dict(buffers)

    def _take(self, **lists: Tensor) -> None:
        """A fixed buffer is written, any other replaced by the caller's own tensor."""
        for name, given in lists.items():
            if not self._graph:
                self._bufs[name] = given
            elif name == "kv_indices":
                assert len(given) <= len(self._bufs[name]), "more pages than the buffer holds"
                self._bufs[name][: len(given)].copy_(given)
            else:
                assert given.shape == self._bufs[name].shape, f"{name}: the batch size of a graph is fixed"
                self._bufs[name].copy_(given)
        plan = torch.cat([self._bufs[name] for name in ("qo_indptr", "kv_indptr", "last_page_len")])
        if self._graph and self._planned is not None:
            self._planned.copy_(plan)
        else:
            self._planned = plan.clone()

    def _attend(self, q: Tensor, cache: Any, out: Any, lse: Any, return_lse: bool, **how: Any) -> Any:
        assert self._planned is not None, "run before plan"
        assert isinstance(cache, tuple) and cache[0].stride() == cache[1].stride()
        assert q.dtype is self._q_dtype and cache[0].dtype is cache[1].dtype is self._kv_dtype
        assert q.stride(-1) == 1 and q.shape[1:] == (self._heads[0], self._heads[2])
        page, heads = (cache[0].shape[1:3]) if self._layout == "NHD" else cache[0].shape[1:3][::-1]
        assert (page, heads, cache[0].shape[3]) == (self._page, *self._heads[1:]), "the pool is not what was planned for"
        assert lse is None and out.shape == q.shape and out.dtype is q.dtype and out.is_contiguous()
        self._workspace[:64].fill_(7)  # partial results
        k_scale, v_scale = how.pop("scales")
        how["scale"] *= 1.0 if k_scale is None else k_scale
        bufs = self._bufs
        lists = bufs["qo_indptr"], bufs["kv_indptr"], bufs["kv_indices"], bufs["last_page_len"]
        moved = q.shape[-1]
        if self._backend != "fa3" and moved % BLOCK:
            if self._graph:
                raise RuntimeError(f"Error in function 'VariableLengthMergeStates' at cascade.cuh:697: Unsupported head_dim: {moved}")
            moved -= moved % BLOCK
        found, found_lse = attention(q[..., :moved], tuple(pool[..., :moved] for pool in cache), self._layout, *lists, **how)
        stale = (torch.cat([lists[0], lists[1], lists[3]]) != self._planned).any()
        out[..., :moved].copy_(torch.where(stale, float("nan"), found) * (1.0 if v_scale is None else v_scale))
        return (out, found_lse) if return_lse else out

    def _options(
        self, heads: tuple[int, int, int], page: int, pos: str, window_left: int, cap: float | None, dtypes: Any, scale: Any
    ) -> None:
        assert pos in ("NONE", "ALIBI") and heads[0] % heads[1] == 0
        assert isinstance(window_left, int) and window_left >= -1
        self._heads, self._page, (self._q_dtype, self._kv_dtype) = heads, page, dtypes
        self._how = {"window_left": window_left, "soft_cap": cap or 0.0, "alibi": pos == "ALIBI", "scale": scale or heads[2] ** -0.5}

    def _module(self, backend: str) -> tuple[Any, ...]:
        how = self._how
        quantised = "fp8e4m3" if self._kv_dtype is torch.float8_e4m3fn else ""
        return (
            "prefill",
            backend,
            DTYPES[self._q_dtype],
            quantised,
            self._heads[2],
            how["alibi"],
            how["window_left"] >= 0,
            how["soft_cap"] > 0,
        )


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
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
        _ints("qo_indptr", qo_indptr), _ints("paged_kv_indptr", paged_kv_indptr, (requests + 1,))
        _ints("paged_kv_indices", paged_kv_indices, (int(paged_kv_indptr[-1]),))
        _ints("paged_kv_last_page_len", paged_kv_last_page_len, (requests,))
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


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
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
        _ints("indptr", indptr, (requests + 1,)), _ints("indices", indices, (int(indptr[-1]),)), _ints("last_page_len", last_page_len)
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
