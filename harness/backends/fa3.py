"""Row ``fa3``: FlashAttention 3, ``flash_attn_with_kvcache`` of the forward-only build ``fa3-fwd``."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends import paged_kernel
from attnmatrix.harness.backends.paged_kernel import PagedKernel, PagedMetadata, has_tree
from attnmatrix.harness.capabilities import Blocked, Capabilities, Claim, Conventions, NotApplicable
from attnmatrix.harness.registry import Row, register
from attnmatrix.harness.signature import has_parameter

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.context import Context

PACKAGE = "fa3-fwd"


def load() -> Any:
    """The module with the function."""
    return importlib.import_module("fa3_fwd_interface")


def create(context: Context) -> AttentionBackend:
    return PagedKernel(context, partial(attend, load()))


def attend(package: Any, context: Context, q: Tensor, keys: Tensor, values: Tensor, meta: PagedMetadata, window: int | None) -> Tensor:
    """Queries are ragged through ``cu_seqlens_q``; the key lengths are read on the device."""
    out: Tensor = package.flash_attn_with_kvcache(
        q,
        keys,
        values,
        cache_seqlens=meta.cache_seqlens,
        page_table=meta.page_table,
        cu_seqlens_q=meta.cu_seqlens_q,
        max_seqlen_q=meta.max_seqlen_q,
        softmax_scale=context.scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window, 0),
        softcap=context.soft_cap or 0.0,
    )
    return out


def _lacks(pattern: str) -> bool:
    return not has_parameter(PACKAGE, "fa3_fwd_interface.py", "flash_attn_with_kvcache", pattern)


def _why_not(case: Case) -> Claim | None:
    """In the order in which the package checks. Release 0.0.3 is built without windows, paged KV and fp16 (``fa3_fwd_config.py``), but takes
    pages that TMA can load, of whole key tiles under prompts of more than one query tile: fp16 is refused behind that."""
    if case.sinks:
        return NotApplicable("no argument for sinks", lambda: _lacks("sink|s_aux"))
    if case.alibi:
        return NotApplicable("no argument for ALiBi slopes", lambda: _lacks("alibi|slope|bias"))
    if has_tree(case):
        return NotApplicable("no argument for a tree mask", lambda: _lacks("mask|tree|ancestor"))
    if not case.num_tokens:
        return None
    if case.dtype == "fp32":
        return Blocked("fp16, bf16 and fp8 only", "RuntimeError", "only supports fp16, bf16")
    if case.kv_dtype is not None:
        return Blocked("keys and values of the queries' dtype only", "RuntimeError", "must have the same dtype")
    if case.window is not None:
        return Blocked("built without windows, and without paged KV", "RuntimeError", "build does not support (local attention|paged KV)")
    if case.dtype == "fp16":
        return Blocked("built without fp16, and without paged KV", "RuntimeError", "build does not support (FP16|paged KV)")
    return Blocked("built without paged KV", "RuntimeError", "build does not support paged KV")


register(
    Row(
        name="fa3",
        kind=AttentionKind.SOFTMAX,
        create=create,
        capabilities=Capabilities(why_not=_why_not),
        conventions=Conventions(window="exclusive"),
        distributions=(PACKAGE, "torch"),  # the kernels are torch operators: refused in torch's dispatch
        devices=("cuda",),
        summary="FlashAttention 3, forward-only build",
        source=__file__,
        more_sources=(paged_kernel.__file__,),
    )
)
