"""Row ``fa4``: FlashAttention 4, ``flash_attn.cute.flash_attn_varlen_func`` with a page table."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends import paged_kernel
from attnmatrix.harness.backends.paged_kernel import PagedKernel, PagedMetadata, has_tree
from attnmatrix.harness.capabilities import Blocked, Capabilities, Claim, Conventions, NotApplicable
from attnmatrix.harness.installed import installed_file
from attnmatrix.harness.registry import Row, register
from attnmatrix.harness.signature import has_parameter

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.context import Context

PACKAGE = "flash-attn-4"
INTERFACE = "flash_attn/cute/interface.py"


def load() -> Any:
    """The module with the function, of this distribution.

    FlashAttention 2 owns ``flash_attn/__init__.py`` and ships an early ``cute`` of its own, so this one is put before it. Raises
    ImportError when another was imported already.
    """
    file = installed_file(PACKAGE, INTERFACE)
    home = str(file.parents[1])
    parent = importlib.import_module("flash_attn")
    if home not in parent.__path__:
        parent.__path__.insert(0, home)
    module = importlib.import_module("flash_attn.cute.interface")
    if module.__file__ is None or not Path(module.__file__).samefile(file):
        raise ImportError(f"flash_attn.cute.interface was imported from {module.__file__}, expected {file}")
    return module


def create(context: Context) -> AttentionBackend:
    return PagedKernel(context, partial(attend, load()))


def attend(package: Any, context: Context, q: Tensor, keys: Tensor, values: Tensor, meta: PagedMetadata, window: int | None) -> Tensor:
    """Lengths are read on the device; the host knows the most queries of a request, and the width of the page table bounds the keys."""
    out: Tensor = package.flash_attn_varlen_func(
        q,
        keys,
        values,
        cu_seqlens_q=meta.cu_seqlens_q,
        max_seqlen_q=meta.max_seqlen_q,
        seqused_k=meta.cache_seqlens,
        page_table=meta.page_table,
        softmax_scale=context.scale,
        causal=True,
        window_size=(None, None) if window is None else (window, 0),
        learnable_sink=context.sinks,
        softcap=context.soft_cap or 0.0,
    )[0]
    return out


def _lacks(pattern: str) -> bool:
    return not has_parameter(PACKAGE, INTERFACE, "flash_attn_varlen_func", pattern)


def _why_not(case: Case) -> Claim | None:
    """A ``score_mod`` or ``mask_mod`` is kernel code of the caller's: it would show what the row wrote, not what the package does."""
    if case.alibi:
        return NotApplicable("no argument for ALiBi slopes", lambda: _lacks("alibi|slope|bias"))
    if has_tree(case):
        return NotApplicable("no argument for a tree mask", lambda: _lacks("tree|ancestor|custom_mask|mask_tensor"))
    if not case.num_tokens:
        return None
    if case.dtype == "fp32":
        return Blocked("fp16, bf16 and fp8 only", "AssertionError", "inputs must be float16, bfloat16")
    if case.kv_dtype is not None:
        return Blocked("keys and values of the queries' dtype only", "AssertionError", "must have the same dtype")
    return None


SNIPPET = """
from flash_attn.cute import flash_attn_varlen_func

def attend(q, k_pool, v_pool, page_table, cu_seqlens_q, cache_seqlens, max_q, max_k, scale, window, soft_cap, sinks):
    return flash_attn_varlen_func(
        q, k_pool, v_pool, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_q, seqused_k=cache_seqlens, page_table=page_table,
        softmax_scale=scale, causal=True, window_size=(None, None) if window is None else (window - 1, 0),
        learnable_sink=sinks, softcap=soft_cap or 0.0,
    )[0]
"""
CONVENTIONS = Conventions(window="exclusive", tail_may_hold_nan=False, window_may_hold_nan=False)
"""Its documentation asks for finite rows behind the end of a last page, which a page of one key tile loads; and what a window hides
has weight 0 in a tile that it shares with what it shows, and 0 times NaN is NaN."""

register(
    Row(
        name="fa4",
        kind=AttentionKind.SOFTMAX,
        create=create,
        capabilities=Capabilities(why_not=_why_not),
        conventions=CONVENTIONS,
        distributions=(PACKAGE, "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi", "torch-c-dlpack-ext"),
        devices=("cuda",),
        summary="FlashAttention 4 (CuTe DSL), paged varlen function",
        snippet=SNIPPET,
        source=__file__,
        more_sources=(paged_kernel.__file__,),
    )
)
