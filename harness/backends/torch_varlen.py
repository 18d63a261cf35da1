"""Row ``torch-varlen``: ``torch.nn.attention.varlen.varlen_attn``, which takes a page table from torch 2.13 on."""

from __future__ import annotations

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

FILE = "torch/nn/attention/varlen.py"


def load() -> Any:
    """The module with the function."""
    from torch.nn.attention import varlen

    return varlen


def create(context: Context) -> AttentionBackend:
    return PagedKernel(context, partial(attend, load()))


def attend(package: Any, context: Context, q: Tensor, keys: Tensor, values: Tensor, meta: PagedMetadata, window: int | None) -> Tensor:
    out: Tensor = package.varlen_attn(
        q,
        keys,
        values,
        meta.cu_seqlens_q,
        meta.cu_seqlens_k,
        meta.max_seqlen_q,
        meta.max_seqlen_k,
        scale=context.scale,
        window_size=(-1 if window is None else window, 0),
        enable_gqa=context.heads.group > 1,
        seqused_k=meta.cache_seqlens,
        block_table=meta.page_table,
    )
    return out


def _lacks(pattern: str) -> bool:
    """Whether the function has no parameter whose name matches, or this torch has no such function."""
    try:
        return not has_parameter("torch", FILE, "varlen_attn", pattern)
    except LookupError:
        return True


def _why_not(case: Case) -> Claim | None:
    """The first two by the signature, which differs between releases; the rest in the order in which the kernel checks."""
    if _lacks("block_table") or _lacks("seqused_k"):
        return NotApplicable("no argument for a page table and lengths in this torch", lambda: _lacks("block_table") or _lacks("seqused_k"))
    for asked, name, pattern in (
        (case.sinks, "sinks", "sink|s_aux"),
        (case.alibi, "ALiBi slopes", "alibi|slope|bias"),
        (case.soft_cap is not None, "a soft cap", "cap"),
        (has_tree(case), "a tree mask", "mask|tree|ancestor"),
    ):
        if asked:
            return NotApplicable(f"no argument for {name}", partial(_lacks, pattern))
    if not case.num_tokens:
        return None
    if case.dtype == "fp32":
        return Blocked("fp16 and bf16 only", "RuntimeError", "only support fp16 and bf16")
    if case.kv_dtype is not None:
        return Blocked("keys and values of the queries' dtype only", "RuntimeError", "must have the same dtype")
    if case.page_size % 256:
        return Blocked("pages of a multiple of 256 tokens only", "RuntimeError", "block size must be divisible by 256")
    return None


register(
    Row(
        name="torch-varlen",
        kind=AttentionKind.SOFTMAX,
        create=create,
        capabilities=Capabilities(why_not=_why_not),
        conventions=Conventions(window="exclusive"),
        devices=("cuda",),
        summary="varlen_attn with a page table (torch 2.13)",
        source=__file__,
        more_sources=(paged_kernel.__file__,),
    )
)
