"""A strict stand-in for the parts of FlashInfer 0.6.13 that the rows call: the same arguments, checks and buffers, dense attention inside.

``install`` puts it in the package's place. Attention reads the lists in the wrapper's buffers, with operators that a graph can capture, and
gives NaN where they are not those of the last plan, since the kernels walk the plan. ``MODULES`` collects which modules would be compiled.
Not modelled: how work is split, and the package's refusals but for masks on fa3.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

MODULES: set[tuple[Any, ...]] = set()
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _ints(name: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    assert tensor.dtype is torch.int32, f"{name} is {tensor.dtype}"
    assert tensor.is_contiguous() and tensor.ndim == 1, f"{name} is no plain vector"
    assert shape is None or tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}, expected {shape}"
    return tensor


def slopes(heads: int) -> Tensor:
    """float32 ``[heads]``: ALiBi's slopes as the package's ``get_alibi_slopes`` gives them."""
    lower = 2 ** math.floor(math.log2(heads))
    found = (2.0 ** (-8.0 / lower)) ** torch.arange(1, lower + 1)
    rest = (2.0 ** (-4.0 / lower)) ** torch.arange(1, 1 + 2 * (heads - lower), 2)
    return torch.cat([found, rest]).float()


def attention(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    layout: str,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    *,
    causal: bool = False,
    window_left: int = -1,
    soft_cap: float = 0.0,
    alibi: bool = False,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    limit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output as ``q`` and LSE to base 2, from what the buffers hold when it runs; ``limit`` int32 ``[R]`` cuts the keys of a request."""
    keys, values = (pool.transpose(1, 2) if layout == "HND" else pool for pool in cache)
    page, requests = keys.shape[1], len(last_page_len)
    entry = torch.arange(len(kv_indices), dtype=torch.int32)
    owner = (torch.searchsorted(kv_indptr, entry, right=True) - 1).clamp(0, requests - 1)
    used = entry < kv_indptr[-1]
    counts = kv_indptr.diff()
    kv_lens = torch.where(counts > 0, (counts - 1) * page + last_page_len, 0)
    position = ((entry - kv_indptr[owner])[:, None] * page + torch.arange(page)).flatten()
    owner = owner.repeat_interleave(page, output_size=len(kv_indices) * page)
    live = used.repeat_interleave(page, output_size=len(owner)) & (position < (kv_lens if limit is None else limit)[owner])
    pages = torch.where(used, kv_indices, 0)
    k, v = (pool[pages].flatten(0, 1).float().masked_fill(~live[:, None, None], 0.0) for pool in (keys, values))
    token = torch.arange(len(q), dtype=torch.int32)
    request = (torch.searchsorted(qo_indptr, token, right=True) - 1).clamp(0, requests - 1)
    own = token - qo_indptr[request]
    back = (kv_lens[request] - qo_indptr.diff()[request] + own)[:, None]  # the query's own position
    seen = live & (owner[None, :] == request[:, None])
    if mask is not None:
        assert mask_indptr is not None
        bit = own[:, None].long() * kv_lens[request][:, None] + position
        byte = (mask_indptr[request][:, None] + bit // 8).clamp(0, len(mask) - 1)
        seen = seen & ((mask[byte].int() >> (bit % 8).int()) % 2 == 1)
    elif causal:
        seen = seen & (position <= back)
    if window_left >= 0:
        seen = seen & (position + window_left >= back)
    group = q.shape[1] // k.shape[1]
    score = torch.einsum("nhd,khd->nhk", q.float(), k.repeat_interleave(group, dim=1)) * scale
    if soft_cap > 0:
        score = soft_cap * torch.tanh(score / soft_cap)
    if alibi:
        score = score + slopes(q.shape[1])[None, :, None] * (position[None, :] - own[:, None])[:, None, :]
    score = score.masked_fill(~seen[:, None, :], float("-inf"))
    if sinks is not None:
        score = torch.cat([score, sinks[None, :, None].expand(*score.shape[:2], 1)], dim=-1)
    lse = torch.logsumexp(score, dim=-1)
    weight = torch.exp(score - torch.where(lse.isinf(), 0.0, lse)[..., None])[..., : len(live)]
    out = torch.einsum("nhk,khd->nhd", weight, v.repeat_interleave(group, dim=1))
    return out.to(q.dtype), lse / math.log(2.0)


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
        bufs = self._bufs
        lists = bufs["qo_indptr"], bufs["kv_indptr"], bufs["kv_indices"], bufs["last_page_len"]
        found, found_lse = attention(q, cache, self._layout, *lists, **how)
        stale = (torch.cat([lists[0], lists[1], lists[3]]) != self._planned).any()
        out.copy_(torch.where(stale, float("nan"), found))
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
        return "prefill", backend, DTYPES[self._q_dtype], self._heads[2], how["alibi"], how["window_left"] >= 0, how["soft_cap"] > 0


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
            MODULES.add(("sinks", backend, DTYPES[jit_args[1]], jit_args[5], False, window, False))

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
        how = {**self._how, "causal": self._causal, "mask": self._mask, "mask_indptr": self._mask_indptr}
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
        how = {**self._how, "alibi": self._how["alibi"] and not (self._tensor_cores and self._backend == "fa3")}
        return self._attend(q, paged_kv_cache, out, lse, return_lse, **how)


def get_batch_prefill_attention_sink_uri(
    backend: str, dtype_q: Any, dtype_kv: Any, dtype_o: Any, dtype_idx: Any, head_dim_qk: int, head_dim_vo: int, pos_encoding_mode: int, use_sliding_window: bool
) -> str:  # fmt: skip
    """A name that tells such modules apart."""
    return f"sinks_{backend}_{dtype_q}_{head_dim_qk}_{use_sliding_window}"


def determine_attention_backend(device: Any, pos_encoding_mode: int, use_fp16_qk_reductions: bool, use_custom_mask: bool, dtype_q: Any, dtype_kv: Any) -> str:  # fmt: skip
    """What the package takes on SM 9.0."""
    return "fa2" if use_custom_mask or pos_encoding_mode else "fa3"


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Any,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    window_left: int = -1,
    out: Any = None,
    out_dtype: Any = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """XQA: queries contiguous, one mask row per draft token in 16-bit words, windows counted back from each query's own key."""
    if max_q_len is not None or cum_seq_lens_q is not None:
        raise ValueError("xqa backend does not support cum_seq_lens_q")
    assert q_len_per_req is not None and isinstance(kv_cache, tuple)
    requests, width = query.shape[0] // q_len_per_req, q_len_per_req
    page, heads = kv_cache[0].shape[2 if kv_layout == "HND" else 1], query.shape[1]
    if page not in (16, 32, 64, 128):
        raise ValueError(f"Invalid page_size: {page}, only 16, 32, 64, 128 are supported")
    assert query.dtype in (torch.bfloat16, torch.float16) and out.dtype is query.dtype and out.is_contiguous()
    assert query.is_contiguous(), "the kernel takes no strides of queries"
    assert block_tables.dtype is torch.int32 and block_tables.is_contiguous() and len(block_tables) == requests
    assert seq_lens.dtype is torch.int32 and tuple(seq_lens.shape) == (requests,)
    assert isinstance(bmm1_scale, float) and isinstance(bmm2_scale, float)
    assert workspace_buffer.dtype is torch.uint8 and len(workspace_buffer) > 8 << 20
    group = heads // kv_cache[0].shape[1 if kv_layout == "HND" else 2]
    MODULES.add(("xqa", "", DTYPES[query.dtype], query.shape[2], False, window_left >= 0, False, page, group, width))
    columns = block_tables.shape[1]
    starts = torch.arange(requests + 1, dtype=torch.int32)
    bits = None
    if width > 1:
        words = -(-width // 32)
        assert mask is not None and mask.dtype is torch.uint16 and tuple(mask.shape) == (requests, width, 2 * words)
        bits = (mask.view(torch.int32).long()[..., None] >> torch.arange(32)).flatten(2)[..., :width] % 2 == 1
    full = torch.arange(columns * page)
    first = (seq_lens - width)[:, None]
    seen = (full < first).repeat_interleave(width, dim=0)
    draft = (full - first).repeat_interleave(width, dim=0)
    inside = (draft >= 0) & (draft < width)
    allowed = bits.flatten(0, 1) if bits is not None else torch.ones(requests * width, width, dtype=torch.bool)
    seen = seen | (inside & allowed.gather(1, draft.clamp(0, width - 1)))
    found, _ = attention(
        query, kv_cache, kv_layout, starts * width, starts * columns, block_tables.flatten(),
        torch.full((requests,), page, dtype=torch.int32), bmm1_scale * bmm2_scale,
        sinks=sinks, mask=_bytes(seen & _window(full, seq_lens, width, window_left)), mask_indptr=starts * (width * columns * page // 8), limit=seq_lens,
    )  # fmt: skip
    out.copy_(found)
    return out


def _window(position: Tensor, seq_lens: Tensor, width: int, window_left: int) -> Tensor:
    own = (seq_lens[:, None] - width + torch.arange(width)).flatten()
    return position[None, :] + window_left >= own[:, None] if window_left >= 0 else torch.ones(len(own), len(position), dtype=torch.bool)


def _bytes(seen: Tensor) -> Tensor:
    """Bits packed as :func:`attention` reads them; a row has a multiple of eight keys, as has a page."""
    return (seen.long().view(*seen.shape[:-1], -1, 8) * 2 ** torch.arange(8)).sum(dim=-1).to(torch.uint8).flatten()


def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: Any,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Any,
    bmm2_scale: Any,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    out: Any = None,
    out_dtype: Any = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Any = None,
    kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """What the package says where its kernels are not installed and may not be fetched."""
    raise RuntimeError("Artifact not found locally: checksums.txt (looked at nowhere).")


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in where ``import flashinfer`` finds it, until the test ends."""
    MODULES.clear()
    members: dict[str, dict[str, Any]] = {
        "flashinfer": {
            "BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper,
            "BatchDecodeWithPagedKVCacheWrapper": BatchDecodeWithPagedKVCacheWrapper,
        },
        "flashinfer.decode": {"trtllm_batch_decode_with_kv_cache": trtllm_batch_decode_with_kv_cache},
        "flashinfer.prefill": {"trtllm_batch_context_with_kv_cache": trtllm_batch_context_with_kv_cache},
        "flashinfer.utils": {"determine_attention_backend": determine_attention_backend},
        "flashinfer.jit": {},
        "flashinfer.jit.attention": {"get_batch_prefill_attention_sink_uri": get_batch_prefill_attention_sink_uri},
        "flashinfer.jit.attention.variants": {"attention_sink_decl": {"fa2": "code of fa2", "fa3": "code of fa3"}},
    }
    for name, found in members.items():
        module = ModuleType(name)
        vars(module).update(found)
        monkeypatch.setitem(sys.modules, name, module)
