"""Strict stand-ins for the FlashAttention packages: their signatures and checks, dense attention in torch behind them."""

from __future__ import annotations

from typing import Any

import torch
from paged_attention import paged_attention
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def _check(condition: bool, message: str) -> None:
    """What TORCH_CHECK raises."""
    if not condition:
        raise RuntimeError(message)


def _paged_checks(q: Tensor, k: Tensor, v: Tensor, table: Tensor, batch: int) -> None:
    _check(q.dtype in HALF, "FlashAttention only support fp16 and bf16 data type")
    _check(k.dtype == q.dtype, "query and key must have the same dtype")
    _check(v.dtype == q.dtype, "query and value must have the same dtype")
    _check(table.dtype == torch.int32, "block_table must have dtype torch.int32")
    _check(table.stride(-1) == 1, "block_table must have contiguous last dimension")
    _check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    _check(q.shape[-1] <= 256 and q.shape[-1] % 8 == 0, "head dimension")
    _check(q.shape[-2] % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
    _check(table.shape[0] == batch, "block_table must have shape (batch_size, max_num_blocks_per_seq)")
    _check(k.shape == v.shape and k.dim() == 4 and k.shape[-1] == q.shape[-1], "k must have shape (num_blocks, page, heads, head_size)")


def _lengths(name: str, tensor: Tensor, count: int) -> None:
    _check(isinstance(tensor, Tensor) and tensor.dtype == torch.int32, f"{name} must have dtype int32")
    _check(tensor.is_contiguous() and tuple(tensor.shape) == (count,), f"{name} must be contiguous, of shape ({count},)")


def _before(window_size: tuple[int, int]) -> int | None:
    assert isinstance(window_size, tuple) and len(window_size) == 2
    assert window_size in ((-1, -1), (-1, 0)) or (window_size[0] >= 0 and window_size[1] == 0)
    return None if window_size[0] < 0 else window_size[0]


def _causal(causal: bool, max_q: int, table: Tensor, page: int, max_k: int) -> None:
    """The stand-ins compute causal attention only, over at most ``max_k`` keys."""
    assert causal
    assert isinstance(max_q, int) and isinstance(max_k, int) and max_q > 0
    assert max_k <= table.shape[1] * page


class FlashAttn2:
    """``flash_attn.flash_attn_interface`` 2.8.3."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert q.dim() == 3 and block_table is not None and softmax_scale is not None
        batch = cu_seqlens_q.numel() - 1
        _paged_checks(q, k, v, block_table, batch)
        _lengths("cu_seqlens_q", cu_seqlens_q, batch + 1)
        _lengths("cu_seqlens_k", cu_seqlens_k, batch + 1)
        _causal(causal, max_seqlen_q, block_table, k.shape[1], max_seqlen_k)
        assert alibi_slopes is None or (alibi_slopes.dtype == torch.float32 and alibi_slopes.shape == (q.shape[1],))
        if max_seqlen_q == 1 and q.shape[1] > k.shape[2] and window_size[0] < 0 and window_size[1] < 0 and alibi_slopes is None:
            q.reshape(batch, *q.shape[1:])
        lens = cu_seqlens_k.diff().clamp(max=max_seqlen_k)
        return paged_attention(q, k, v, cu_seqlens_q, lens, block_table, softmax_scale, _before(window_size), softcap, slopes=alibi_slopes)

    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        assert q.dim() == 4 and block_table is not None and cache_seqlens is not None and softmax_scale is not None and causal
        batch, width = q.shape[:2]
        _paged_checks(q, k_cache, v_cache, block_table, batch)
        _lengths("seqlens_k", cache_seqlens, batch)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * width
        out = paged_attention(
            q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table, softmax_scale, _before(window_size), softcap,
            slopes=alibi_slopes,
        )  # fmt: skip
        return out.unflatten(0, (batch, width))


class FlashAttn3Forward:
    """``fa3_fwd_interface`` 0.0.3, a build without paged KV, windows and fp16."""

    @staticmethod
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        qv: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        _check(q.dtype in HALF, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
        assert q.dim() == 3 and page_table is not None and cu_seqlens_q is not None and cache_seqlens is not None
        _check(max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided")
        _check(page_table.dtype == torch.int32, "page_table must have dtype torch.int32")
        _lengths("cu_seqlens_q", cu_seqlens_q, cu_seqlens_q.numel())
        _lengths("seqused_k", cache_seqlens, cu_seqlens_q.numel() - 1)
        _check(_before(window_size) is None, "This flash attention build does not support local attention.")
        by_tma = k_cache.shape[1] == 256 and q.shape[2] == 64 and max_seqlen_q * (q.shape[1] // k_cache.shape[2]) > 192
        _check(not (by_tma and q.dtype == torch.float16), "This flash attention build does not support FP16.")
        raise RuntimeError("This flash attention build does not support paged KV.")


class FlashAttn4:
    """``flash_attn.cute.interface`` 4.0.0b36."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        gather_kv_indices: Tensor | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Any = None,
        score_mod_bwd: Any = None,
        mask_mod: Any = None,
        block_sparse_tensors: Any = None,
        aux_tensors: Any = None,
        aux_scalars: Any = None,
        return_lse: bool = False,
        scheduler_metadata: Any = None,
        seqlen_k_per_split: int | None = None,
        disable_scheduler_metadata: bool = False,
        gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert cu_seqlens_q is not None and seqused_k is not None and page_table is not None and softmax_scale is not None
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        assert page_table.dtype == torch.int32, "page_table must be int32"
        assert page_table.stride(-1) == 1, "page_table must be contiguous in the last dimension"
        batch = cu_seqlens_q.shape[0] - 1
        assert page_table.shape[0] == batch
        assert k.shape == v.shape and k.dim() == 4 and k.shape[-1] == q.shape[-1]
        assert seqused_k.shape == (batch,), "seqused_k must have shape (batch_size,)"
        assert v.dtype in HALF, "inputs must be float16, bfloat16, fp8 e4m3fn, or fp8 e5m2"
        assert q.dtype == k.dtype == v.dtype, "q, k, v, and qv must have the same dtype"
        for lens in (cu_seqlens_q, seqused_k):
            assert lens.dtype == torch.int32, "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be int32"
            assert lens.stride(0) == 1, "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be contiguous"
        assert learnable_sink is None or learnable_sink.shape == (q.shape[1],)
        assert causal and isinstance(max_seqlen_q, int)
        left, right = window_size
        assert (left is None and right is None) or (left is not None and left >= 0 and right == 0)
        out = paged_attention(q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale, left, softcap, learnable_sink)
        return out, None


class TorchVarlen:
    """``torch.nn.attention.varlen`` of torch 2.13. Of several requests whose longest has more than a block of keys it splits them, unless told
    not to, and mixes the parts; not modelled: when it splits else."""

    @staticmethod
    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        if not enable_gqa and query.shape[1] != key.shape[2]:
            raise ValueError("Expect query and key/value to have the same number of heads")
        assert cu_seq_k is not None and seqused_k is not None and block_table is not None and scale is not None
        batch = cu_seq_q.numel() - 1
        _paged_checks(query, key, value, block_table, batch)
        _lengths("cu_seqlens_q", cu_seq_q, batch + 1)
        _lengths("cu_seqlens_k", cu_seq_k, batch + 1)
        _lengths("seqused_k", seqused_k, batch)
        _causal(window_size[1] == 0, max_q, block_table, key.shape[1], max_k)
        out = paged_attention(query, key, value, cu_seq_q, seqused_k.clamp(max=max_k), block_table, scale, _before(window_size))
        if num_splits is None and batch > 1 and max_k > (256 if query.shape[-1] <= 64 else 128):
            out[1:] = float("nan")
        return out
