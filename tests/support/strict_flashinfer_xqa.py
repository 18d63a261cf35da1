"""The strict stand-in's TensorRT-LLM entry points: XQA on SM 9.0, with its faults, and the refusal of prompts."""

from __future__ import annotations

from typing import Any

import torch
from strict_flashinfer_attention import attention
from strict_flashinfer_wrappers import DTYPES, MODULES
from torch import Tensor


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
    """XQA: one mask row per draft token in 16-bit words, windows counted back from the query's own key. Faults: the strides of queries are
    not looked at, and several tokens per request have no window."""
    if max_q_len is not None or cum_seq_lens_q is not None:
        raise ValueError("xqa backend does not support cum_seq_lens_q")
    assert q_len_per_req is not None and isinstance(kv_cache, tuple)
    requests, width = query.shape[0] // q_len_per_req, q_len_per_req
    page, heads = kv_cache[0].shape[2 if kv_layout == "HND" else 1], query.shape[1]
    if page not in (16, 32, 64, 128):
        raise ValueError(f"Invalid page_size: {page}, only 16, 32, 64, 128 are supported")
    assert query.dtype in (torch.bfloat16, torch.float16) and out.dtype is query.dtype and out.is_contiguous()
    query = torch.as_strided(query, query.shape, torch.empty(query.shape, device="meta").stride(), query.storage_offset())
    assert block_tables.dtype is torch.int32 and block_tables.is_contiguous() and len(block_tables) == requests
    assert seq_lens.dtype is torch.int32 and tuple(seq_lens.shape) == (requests,)
    assert isinstance(bmm1_scale, float) and isinstance(bmm2_scale, float)
    assert workspace_buffer.dtype is torch.uint8 and len(workspace_buffer) > 8 << 20
    group = heads // kv_cache[0].shape[1 if kv_layout == "HND" else 2]
    MODULES.add(("xqa", "", DTYPES[query.dtype], "", query.shape[2], False, window_left >= 0, False, page, group, width))
    columns = block_tables.shape[1]
    starts = torch.arange(requests + 1, dtype=torch.int32)
    bits = None
    window_left = window_left if width == 1 else -1
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
