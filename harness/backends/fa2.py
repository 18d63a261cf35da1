"""Row ``fa2``: FlashAttention 2, ``flash_attn_varlen_func`` for prompts and ``flash_attn_with_kvcache`` where each request has as many tokens."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends import paged_kernel
from attnmatrix.harness.backends.paged_kernel import PagedKernel, PagedMetadata, has_tree
from attnmatrix.harness.capabilities import Blocked, Capabilities, Claim, Conventions, KnownFault, NotApplicable
from attnmatrix.harness.registry import Row, installed_version, register
from attnmatrix.harness.signature import has_parameter

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.context import Context

PACKAGE = "flash-attn"
INTERFACE = "flash_attn/flash_attn_interface.py"
KERNEL_DIMS = (32, 64, 96, 128, 192, 256)
"""A head dim runs in the kernel of the next larger one of these."""


def load() -> Any:
    """The module with the two functions."""
    from flash_attn import flash_attn_interface

    return flash_attn_interface


def create(context: Context) -> AttentionBackend:
    return PagedKernel(context, partial(attend, load()))


def attend(package: Any, context: Context, q: Tensor, keys: Tensor, values: Tensor, meta: PagedMetadata, window: int | None) -> Tensor:
    options = {
        "block_table": meta.page_table,
        "softmax_scale": context.scale,
        "causal": True,
        "window_size": (-1, -1) if window is None else (window, 0),
        "softcap": context.soft_cap or 0.0,
        "alibi_slopes": context.alibi_slopes,
    }
    if meta.width is not None:
        query = q.unflatten(0, (-1, meta.width))
        return package.flash_attn_with_kvcache(query, keys, values, cache_seqlens=meta.cache_seqlens, **options).flatten(0, 1)
    tables = meta.cu_seqlens_q, meta.cu_seqlens_k, meta.max_seqlen_q, meta.max_seqlen_k
    return package.flash_attn_varlen_func(q, keys, values, *tables, **options)


def _lacks(pattern: str) -> bool:
    """Whether neither function has a parameter whose name matches."""
    functions = ("flash_attn_varlen_func", "flash_attn_with_kvcache")
    return not any(has_parameter(PACKAGE, INTERFACE, name, pattern) for name in functions)


@cache
def built_dims(version: str | None) -> tuple[int, ...]:
    """The kernels in an installation: all, or those that a version such as ``2.8.3+local-subset.64.128`` names."""
    subset = re.search(r"\+local[-._]subset\.([\d.]+)$", version or "")
    return tuple(int(dim) for dim in subset.group(1).split(".")) if subset else KERNEL_DIMS


def _why_not(case: Case) -> Claim | None:
    """In the order in which the package checks."""
    if case.sinks:
        return NotApplicable("no argument for sinks", lambda: _lacks("sink|s_aux"))
    if has_tree(case):
        return NotApplicable("no argument for a tree mask", lambda: _lacks("mask|tree|ancestor"))
    if not case.num_tokens:
        return None
    if case.dtype == "fp32":
        return Blocked("fp16 and bf16 only", "RuntimeError", "only support fp16 and bf16")
    if case.kv_dtype is not None:
        return Blocked("keys and values of the queries' dtype only", "RuntimeError", "must have the same dtype")
    if case.page_size % 256:
        return Blocked("pages of a multiple of 256 tokens only", "RuntimeError", "block size must be divisible by 256")
    if case.heads.dim > KERNEL_DIMS[-1]:
        return Blocked("head dims to 256 only", "RuntimeError", "head dimension at most 256")
    kernel = next(dim for dim in KERNEL_DIMS if case.heads.dim <= dim)
    if kernel not in built_dims(installed_version(PACKAGE)):
        return Blocked("a local build without this head dim", "RuntimeError", r"^not built\b")
    return None


def _one_token_beside_none(case: Case, mode: RunnerMode) -> bool:
    """Whether ``mha_varlen_fwd`` takes a batch for one token per request, whose heads of a group become rows (``seqlenq_ngroups_swapped``),
    and it is not."""
    unlimited = any(case.layer_window(layer) is None for layer in (0, 1))
    uneven = max(case.new_lens, default=0) == 1 and case.num_tokens < case.batch_size
    return uneven and case.heads.group > 1 and unlimited and not case.alibi


SNIPPET = """
from flash_attn import flash_attn_varlen_func

def attend(q, k_pool, v_pool, page_table, cu_seqlens_q, cache_seqlens, max_q, max_k, scale, window, soft_cap, sinks):
    assert sinks is None
    cu_seqlens_k = torch.nn.functional.pad(cache_seqlens.cumsum(0), (1, 0)).int()
    return flash_attn_varlen_func(
        q, k_pool, v_pool, cu_seqlens_q, cu_seqlens_k, max_q, max_k, softmax_scale=scale, causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0), softcap=soft_cap or 0.0, block_table=page_table,
    )
"""

register(
    Row(
        name="fa2",
        kind=AttentionKind.SOFTMAX,
        create=create,
        capabilities=Capabilities(
            why_not=_why_not,
            known_faults=(
                KnownFault(
                    _one_token_beside_none,
                    finding="fa2_one_token_beside_none_raises",
                    diagnosis="raises: is invalid for input of size",
                    reason="max_seqlen_q == 1 under GQA is read as one token for each request: a request without a token makes a reshape fail",
                ),
            ),
        ),
        conventions=Conventions(window="exclusive"),
        distributions=(PACKAGE,),
        devices=("cuda",),
        summary="FlashAttention 2, paged varlen and KV-cache functions",
        snippet=SNIPPET,
        source=__file__,
        more_sources=(paged_kernel.__file__,),
    )
)
