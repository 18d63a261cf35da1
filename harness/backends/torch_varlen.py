"""Rows ``torch-varlen`` and ``torch-varlen-1``: ``torch.nn.attention.varlen.varlen_attn``, which takes a page table from torch 2.13 on, with
the number of splits left to it and with one."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.backends import paged_kernel
from attnmatrix.harness.backends.paged_kernel import PagedKernel, PagedMetadata, has_tree
from attnmatrix.harness.capabilities import Blocked, Capabilities, Claim, Conventions, KnownFault, NotApplicable
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


def create(context: Context, splits: int | None) -> AttentionBackend:
    return PagedKernel(context, partial(attend, load(), splits))


def attend(
    package: Any, splits: int | None, context: Context, q: Tensor, keys: Tensor, values: Tensor, meta: PagedMetadata, window: int | None
) -> Tensor:
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
        num_splits=splits,
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


MULTIPROCESSORS = 132  # of an H100 or H200 (SXM)


def chosen_splits(requests: int, heads: int, longest_new: int, longest: int, dim: int) -> int:
    """Parts that FlashAttention 2 splits the keys into when it may choose: the fewest that fill the GPU about as well as the best number.

    ``heads`` are query heads, ``longest_new`` and ``longest`` the largest numbers of new tokens and of keys. Formula:
    ``num_splits_heuristic`` and ``set_params_splitkv`` (``flash_api.cpp``), for 128 threads a block, two blocks a multiprocessor.
    """
    key_blocks = math.ceil(longest / (256 if dim <= 64 else 128 if dim <= 128 else 64))
    work, places = requests * heads * math.ceil(longest_new / 64), 2 * MULTIPROCESSORS
    if work >= 0.8 * places:
        return 1
    numbers = range(1, min(128, places, key_blocks) + 1)
    useful = [n for n in numbers if n == 1 or math.ceil(key_blocks / n) != math.ceil(key_blocks / (n - 1))]
    filled = {n: work * n / places / math.ceil(work * n / places) for n in useful}
    return next(n for n in useful if filled[n] >= 0.85 * max(filled.values()))


def _splits_requests(case: Case, mode: RunnerMode) -> bool:
    """Several requests whose keys are split; a graph is captured for one request and one page more at the least."""
    if not case.num_tokens:
        return False
    requests, longest = case.batch_size, max(case.kv_lens)
    if mode.uses_graph and not mode.pads_tokens:
        requests, longest = requests + 1, (math.ceil(longest / case.page_size) + 1) * case.page_size
    return requests > 1 and chosen_splits(requests, case.heads.q, max(case.new_lens), longest, case.heads.dim) > 1


MIXED = KnownFault(
    _splits_requests,
    finding="torch_varlen_splits_mix_requests",
    diagnosis="undefined",
    reason="where the kernel splits the keys of several requests (its default for small batches), their parts are merged wrongly, over memory "
    "that nothing wrote; num_splits=1 is right",
)


for row_name, splits, faults, summary in (
    ("torch-varlen", None, (MIXED,), "varlen_attn with a page table (torch 2.13)"),
    ("torch-varlen-1", 1, (), "varlen_attn with a page table and num_splits=1 (torch 2.13)"),
):
    register(
        Row(
            name=row_name,
            kind=AttentionKind.SOFTMAX,
            create=partial(create, splits=splits),
            capabilities=Capabilities(why_not=_why_not, known_faults=faults),
            conventions=Conventions(window="exclusive"),
            devices=("cuda",),
            summary=summary,
            source=__file__,
            more_sources=(paged_kernel.__file__,),
        )
    )
