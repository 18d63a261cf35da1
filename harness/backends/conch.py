"""Row ``conch``: Conch's Triton kernels, ``varlen_attention`` for prompts and ``paged_attention`` for decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.capabilities import Blocked, Capabilities, Conventions, KnownFault, NotApplicable, RoundingStep
from attnmatrix.harness.interpreter import prepare_triton
from attnmatrix.harness.lazy import torch
from attnmatrix.harness.registry import Row, register
from attnmatrix.harness.signature import has_parameter

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch
    from attnmatrix.harness.context import Context

PACKAGE = "conch-triton-kernels"


@dataclass
class ConchMetadata:
    cu_seqlens_q: Tensor  # on gpu; int32 [R + 1]
    cache_seqlens: Tensor  # on gpu; int32 [R]; cached and new tokens
    page_table: Tensor  # on gpu; int32 [R, pages]
    max_seqlen_q: int  # on cpu
    max_seqlen_k: int  # on cpu

    def get_last_indices(self, bs: int) -> Tensor:
        return self.cu_seqlens_q[1 : bs + 1] - 1


class Conch(AttentionBackend):
    """One kernel call per layer and batch over the physical pool and its page table."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        prepare_triton(context.device, interpreted=True)
        from conch.ops.attention.paged_attention import paged_attention
        from conch.ops.attention.varlen_attention import varlen_attention

        self._paged_attention, self._varlen_attention = paged_attention, varlen_attention
        self._one = torch.ones(1, device=context.device)  # the queries are not quantised
        self._scales = [self._layer_scales(layer) for layer in range(context.num_layers)]

    def _layer_scales(self, layer: int) -> dict[str, Any]:
        """What both functions are told of a quantised cache."""
        context = self.context
        if context.kv is None or not context.kv.quantised:
            return {}
        k_scale, v_scale = (torch.tensor([scale], device=context.device) for scale in (context.k_scale(layer), context.v_scale(layer)))
        return {"kv_cache_dtype": "fp8", "k_scale": k_scale, "v_scale": v_scale}

    def prepare_metadata(self, batch: Batch) -> None:
        size, longest = self.context.page_size, max(batch.kv_lens, default=0)
        lens = batch.seq_lens
        if batch.forward_mode.seq_lens_is_prefix:
            lens = lens + batch.cu_seqlens_q.diff()
        table = self.context.req_to_token[batch.req_pool_indices, :longest:size] // size
        batch.attn_metadata = ConchMetadata(batch.cu_seqlens_q, lens, table, max(batch.new_lens, default=0), longest)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        context, meta = self.context, batch.attn_metadata
        assert context.kv is not None
        context.kv.store(layer_id, batch.out_loc, k, v)
        keys, values = context.kv.k(layer_id), context.kv.v(layer_id)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        options = {"output": out, "scale": context.scale, "softcap": context.soft_cap or 0.0, **self._scales[layer_id]}
        if not batch.num_tokens:
            return out
        if batch.forward_mode is ForwardMode.DECODE:
            return self._paged_attention(q, keys, values, meta.page_table, meta.cache_seqlens, **options)
        if self._scales[layer_id]:
            options["q_scale"] = self._one
        return self._varlen_attention(
            q, keys, values, meta.cu_seqlens_q, meta.max_seqlen_q, meta.cache_seqlens, meta.max_seqlen_k, meta.page_table,
            causal=True, strict=True, **options,
        )  # fmt: skip

    def inspect_metadata(self, batch: Batch) -> PreparedMetadata:
        meta = batch.attn_metadata
        return PreparedMetadata(cu_seqlens_q=meta.cu_seqlens_q, cache_seqlens=meta.cache_seqlens, page_table=meta.page_table)

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        context, width = self.context, self.context.tokens_per_request
        self._static = {
            size: ConchMetadata(
                torch.arange(size + 1, dtype=torch.int32, device=context.device) * width,
                torch.full((size,), width, dtype=torch.int32, device=context.device),
                torch.zeros(size, context.pages_per_request, dtype=torch.int32, device=context.device),
                width,
                max_seq_len,
            )
            for size in batch_sizes
        }

    def prepare_for_capture(self, batch: Batch) -> None:
        batch.attn_metadata = self._static[batch.padded_reqs]

    def prepare_for_replay(self, batch: Batch) -> None:
        static, fresh = self._static[batch.padded_reqs], batch.attn_metadata
        static.cu_seqlens_q.copy_(fresh.cu_seqlens_q)
        static.cache_seqlens.copy_(fresh.cache_seqlens)
        static.page_table[:, : fresh.page_table.shape[1]].copy_(fresh.page_table)


def _lacks(pattern: str) -> bool:
    """Whether neither function has a parameter whose name matches."""
    functions = ("varlen_attention", "paged_attention")
    return not any(has_parameter(PACKAGE, f"conch/ops/attention/{name}.py", name, pattern) for name in functions)


def _why_not(case: Case) -> NotApplicable | None:
    if case.sinks:
        return NotApplicable("no argument for sinks", lambda: _lacks("sink|s_aux"))
    if case.alibi:
        return NotApplicable("no argument for ALiBi slopes", lambda: _lacks("alibi|slope|bias"))
    if case.window is not None:
        return NotApplicable("no argument for a window", lambda: _lacks("window|local|left"))
    if any(case.tree(request) != tuple(range(-1, new - 1)) for request, new in enumerate(case.new_lens)):
        return NotApplicable("no argument for a tree mask", lambda: _lacks("mask|tree|ancestor"))
    return None


def _interpreter_limits(case: Case) -> Blocked | None:
    if case.dtype == "bf16" and case.num_tokens:
        return Blocked("Triton's interpreter builds no bf16 constant", "InterpreterError", "no attribute 'get_bf16'")
    if case.soft_cap is not None:
        return Blocked("Triton's interpreter runs no libdevice function (tanh)", "InterpreterError", "'float' and 'NoneType'")
    return None


def _compiler_limits(case: Case) -> Blocked | None:
    if case.page_size < 16 and case.num_tokens:
        return Blocked("pages are the inner side of a tl.dot, which takes 16 at least", "CompilationError", "K >= 16")
    return None


def _prefix_hit(case: Case, mode: RunnerMode) -> bool:
    return case.forward is not ForwardMode.DECODE and any(p and n > 1 for p, n in zip(case.prefix_lens, case.new_lens, strict=True))


def _decodes_wide_pool(case: Case, mode: RunnerMode) -> bool:
    return case.forward is ForwardMode.DECODE and case.has_wide_pool


SNIPPET = """
from conch.ops.attention.paged_attention import paged_attention
from conch.ops.attention.varlen_attention import varlen_attention

def attend(q, k_pool, v_pool, page_table, cu_seqlens_q, cache_seqlens, max_q, max_k, scale, window, soft_cap, sinks):
    assert window is None and sinks is None
    options = {"output": torch.empty_like(q), "scale": scale, "softcap": soft_cap or 0.0}
    if max_q == 1 and len(q) == len(page_table):
        return paged_attention(q, k_pool, v_pool, page_table, cache_seqlens, **options)
    tables = cu_seqlens_q, max_q, cache_seqlens, max_k, page_table
    return varlen_attention(q, k_pool, v_pool, *tables, causal=True, strict=True, **options)
"""
ROUNDING = (
    RoundingStep(
        "running sum and output in the input dtype, the running maximum rounded after its use",
        "varlen_attention.py: p = tl.exp(qk - m_ij[:, None]), then m_i = m_ij.to(dtype) with the output's dtype",
        lambda case, device: case.forward is not ForwardMode.DECODE,
    ),
    RoundingStep(
        "scores, running state and results of splits in the input dtype",
        "paged_attention.py: qk = (scale * tl.dot(query, key_block)).to(dtype); lse_scratchpad has the output's dtype",
        lambda case, device: case.forward is ForwardMode.DECODE,
    ),
    RoundingStep(
        "weights of a page added one by one in the input dtype",
        "both kernels: l_ij = tl.sum(p, axis=1) of p in the output's dtype, which compiled code adds in that dtype",
        lambda case, device: case.dtype != "fp32" and device == "cuda",
    ),
    RoundingStep(
        "products of factors cut to TF32",
        "both kernels: tl.dot(query, key_block) and tl.dot(p, value_block) of float32 operands",
        lambda case, device: case.dtype == "fp32" and device == "cuda",
    ),
)


register(
    Row(
        name="conch",
        kind=AttentionKind.SOFTMAX,
        create=Conch,
        capabilities=Capabilities(
            why_not=_why_not,
            interpreter_limits=_interpreter_limits,
            compiler_limits=_compiler_limits,
            known_faults=(
                KnownFault(
                    _prefix_hit,
                    finding="conch_causal_mask_ignores_prefix",
                    diagnosis="Y80",
                    reason="varlen_attention aligns its causal mask top-left: with a cached prefix, new token i sees keys 0..i only",
                ),
                KnownFault(
                    _decodes_wide_pool,
                    finding="conch_decode_page_offset_in_32_bits",
                    diagnosis="B58",
                    reason="paged_attention multiplies the page number by the page stride in 32 bits: pages past 2**31 elements are read elsewhere",
                ),
            ),
        ),
        conventions=Conventions(rounding=ROUNDING),
        distributions=(PACKAGE, "triton"),
        interpreted=True,
        summary="Triton varlen and paged attention",
        snippet=SNIPPET,
        source=__file__,
    )
)
