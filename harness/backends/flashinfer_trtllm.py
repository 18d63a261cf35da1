"""Row ``trtllm``: FlashInfer's TensorRT-LLM entry points. What they run depends on the GPU: decode and verify are XQA kernels on SM 9.0 and
trtllm-gen kernels on SM 10.0, prompts are trtllm-gen kernels, which exist for SM 10.0 only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.backends import flashinfer_lists as lists_file
from attnmatrix.harness.backends import flashinfer_wrappers as wrappers_file
from attnmatrix.harness.backends.flashinfer_lists import kernel_window
from attnmatrix.harness.backends.flashinfer_wrappers import PACKAGE, workspace
from attnmatrix.harness.capabilities import Blocked, Capabilities, Claim, Conventions, Deferred, KnownFault, NotApplicable, RoundingStep
from attnmatrix.harness.lazy import torch
from attnmatrix.harness.registry import Row, register
from attnmatrix.harness.signature import has_parameter

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch
    from attnmatrix.harness.context import Context

WORKSPACE = (128 << 20) + 1024  # bytes; a size of its own, so that no other row's partial results lie where XQA keeps its semaphores
WORD = 32  # draft tokens per word of a mask


@dataclass
class TrtllmMetadata:
    block_tables: Tensor  # on gpu; int32 [R, pages]
    cache_seqlens: Tensor  # on gpu; int32 [R]; cached and new tokens
    cu_seqlens_q: Tensor  # on gpu; int32 [R + 1]
    max_seqlen_q: int  # on cpu
    max_seqlen_k: int  # on cpu
    width: int | None  # on cpu; new tokens per request, None where they differ
    mask: Tensor | None  # on gpu; int32 [R, width, words]; bit j: the draft token sees draft token j of its request

    def get_last_indices(self, bs: int) -> Tensor:
        return self.cu_seqlens_q[1 : bs + 1] - 1


class Trtllm(AttentionBackend):
    """One kernel call per layer and batch over the physical pool and its page table.

    The package would fetch kernels that are not installed from the network; a run of cells may not depend on that, so it is told not to.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        os.environ.setdefault("FLASHINFER_NO_DOWNLOAD", "1")
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache

        self._decode, self._context = trtllm_batch_decode_with_kv_cache, trtllm_batch_context_with_kv_cache
        self._workspace = workspace(str(context.device), WORKSPACE)

    def prepare_metadata(self, batch: Batch) -> None:
        if self._workspace.broken():
            raise RuntimeError("a kernel wrote outside its workspace")
        size, longest = self.context.page_size, max(batch.kv_lens, default=0)
        lens = batch.seq_lens
        if batch.forward_mode.seq_lens_is_prefix:
            lens = lens + batch.cu_seqlens_q.diff()
        table = self.context.req_to_token[batch.req_pool_indices, :longest:size] // size
        widths = set(batch.new_lens)
        width = widths.pop() if len(widths) == 1 else None
        mask = draft_mask(batch.drafts.ancestors, width) if batch.drafts is not None and width is not None and width > 1 else None
        starts = batch.cu_seqlens_q.clone()
        batch.attn_metadata = TrtllmMetadata(table.int(), lens.clone(), starts, max(batch.new_lens, default=0), longest, width, mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        context, meta = self.context, batch.attn_metadata
        assert context.kv is not None
        context.kv.store(layer_id, batch.out_loc, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if not batch.num_tokens:
            return out
        cache = (context.kv.k(layer_id), context.kv.v(layer_id))
        options: dict[str, Any] = {
            "bmm1_scale": context.scale * context.k_scale(layer_id),
            "bmm2_scale": context.v_scale(layer_id),
            "window_left": kernel_window(context.windows[layer_id]),
            "out": out,
            "sinks": context.sinks,
            "kv_layout": context.kv.layout,
        }
        lens, tables = meta.cache_seqlens, meta.block_tables
        if batch.forward_mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
            return self._decode(q, cache, self._workspace.tensor, tables, lens, meta.max_seqlen_k, **options, **self._drafts(meta))
        sizes = {"max_q_len": meta.max_seqlen_q, "max_kv_len": meta.max_seqlen_k, "batch_size": batch.padded_reqs}
        starts_k = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
        starts = {"cum_seq_lens_q": meta.cu_seqlens_q, "cum_seq_lens_kv": starts_k}
        return self._context(q, cache, self._workspace.tensor, tables, lens, **sizes, **starts, **options)

    @staticmethod
    def _drafts(meta: TrtllmMetadata) -> dict[str, Any]:
        """How the new tokens are laid out: the same number for each request, with a mask from two on, or any number."""
        if meta.width is None:
            return {"q_len_per_req": None, "max_q_len": meta.max_seqlen_q, "cum_seq_lens_q": meta.cu_seqlens_q}
        return {"q_len_per_req": meta.width, "mask": None if meta.mask is None else meta.mask.view(torch.uint16)}

    def inspect_metadata(self, batch: Batch) -> PreparedMetadata:
        meta = batch.attn_metadata
        return PreparedMetadata(cu_seqlens_q=meta.cu_seqlens_q, cache_seqlens=meta.cache_seqlens, page_table=meta.block_tables)

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        context, width = self.context, self.context.tokens_per_request
        ints = partial(torch.zeros, dtype=torch.int32, device=context.device)
        self._static = {
            size: TrtllmMetadata(
                ints(size, context.pages_per_request),
                ints(size) + width,
                torch.arange(size + 1, dtype=torch.int32, device=context.device) * width,
                width,
                max_seq_len,
                width,
                ints(size, width, -(-width // WORD)) if width > 1 else None,
            )
            for size in batch_sizes
        }

    def prepare_for_capture(self, batch: Batch) -> None:
        batch.attn_metadata = self._static[batch.padded_reqs]

    def prepare_for_replay(self, batch: Batch) -> None:
        static, fresh = self._static[batch.padded_reqs], batch.attn_metadata
        static.block_tables[:, : fresh.block_tables.shape[1]].copy_(fresh.block_tables)
        static.cache_seqlens.copy_(fresh.cache_seqlens)
        if static.mask is not None:
            static.mask.copy_(fresh.mask)
        batch.attn_metadata = static


def draft_mask(ancestors: Tensor, width: int) -> Tensor:
    """int32 ``[R, width, words]``: the bool ``ancestors`` ``[R * width, widest]`` in words of 32 bits, the lowest bit first."""
    words = -(-width // WORD)
    seen = torch.nn.functional.pad(ancestors[:, :width].long(), (0, words * WORD - width)).view(-1, words, WORD)
    packed = (seen << torch.arange(WORD, device=ancestors.device)).sum(dim=-1)
    return torch.where(packed >= 1 << (WORD - 1), packed - (1 << WORD), packed).int().view(-1, width, words)


def _lacks(pattern: str) -> bool:
    named = (("flashinfer/decode.py", "trtllm_batch_decode_with_kv_cache"), ("flashinfer/prefill.py", "trtllm_batch_context_with_kv_cache"))
    return not any(has_parameter(PACKAGE, ending, function, pattern) for ending, function in named)


def _why_not(case: Case) -> Claim | None:
    if not case.num_tokens:
        return None
    if case.soft_cap is not None:
        return NotApplicable("no argument for a soft cap", lambda: _lacks("soft_?cap|logits_cap"))
    if case.alibi:
        return NotApplicable("no argument for ALiBi slopes", lambda: _lacks("alibi|slope|pos_encoding"))
    if case.forward not in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        return Blocked("prompts are trtllm-gen kernels, for SM 10.0 and not in the wheel", "RuntimeError", "Artifact not found locally")
    if len(set(case.new_lens)) > 1:
        return Blocked("XQA takes the same number of tokens for each request", "ValueError", "xqa backend does not support cum_seq_lens_q")
    if case.dtype == "fp32":
        return Blocked("float32 has no kernel", "ValueError", "Invalid dtype: torch.float32 for XQA")
    if case.kv_dtype is not None and not _chains_with_sinks(case):
        return Deferred("XQA multiplies in fp8: the queries are quantised too, which no rounding step says yet", "#5")
    if case.page_size not in (16, 32, 64, 128):
        return Blocked("pages of 16, 32, 64 and 128 tokens", "ValueError", rf"Invalid page_size: {case.page_size}, only 16, 32, 64, 128")
    return None


def _chains_with_sinks(case: Case) -> bool:
    """Several tokens per request and sinks: the package takes its kernel without fp8 products then (xqa.py, ``run_sm90_fp8_mha = False``)."""
    return case.sinks and max(case.new_lens, default=0) > 1


def _rounds_parts(case: Case, device: str) -> bool:
    return case.dtype != "fp32"


def _strided_beyond_window(case: Case, mode: RunnerMode) -> bool:
    return _strided_queries(case, mode) and _drafts_beyond_window(case, mode)


def _strided_queries(case: Case, mode: RunnerMode) -> bool:
    return case.strided and case.num_tokens > 1


def _drafts_beyond_window(case: Case, mode: RunnerMode) -> bool:
    return case.window is not None and max(case.new_lens, default=0) > 1 and max(case.kv_lens) > case.window


KNOWN_FAULTS = (
    KnownFault(
        _strided_beyond_window,
        finding="flashinfer_xqa_reads_strided_queries_as_contiguous",
        diagnosis="unexplained",
        reason="XQA reads strided queries as if contiguous and, of several tokens per request, leaves the window's mask out: both at once",
    ),
    KnownFault(
        _strided_queries,
        finding="flashinfer_xqa_reads_strided_queries_as_contiguous",
        diagnosis="X44",
        reason="XQA's launcher hands on the queries' address without their strides: a view into a fused projection is read as if contiguous",
    ),
    KnownFault(
        _drafts_beyond_window,
        finding="flashinfer_xqa_verify_has_no_window",
        diagnosis="X70",
        reason="XQA compiled for several tokens per request leaves the window's mask out; at most whole leading tiles are skipped",
    ),
)


register(
    Row(
        name="trtllm",
        kind=AttentionKind.SOFTMAX,
        create=Trtllm,
        capabilities=Capabilities(why_not=_why_not, known_faults=KNOWN_FAULTS),
        conventions=Conventions(
            kv_layout="HND",
            window="exclusive",
            window_may_hold_nan=False,
            rounding=(
                RoundingStep(
                    "weights rounded to the input dtype before they are summed",
                    "xqa/mha.cu: computeRowSum(warp, fp16Acc) after toFp16(acc)",
                    _rounds_parts,
                ),
                RoundingStep(
                    "parts of an output rounded to the input dtype before they are merged",
                    "xqa/mha.cu: outTile = toFp16(acc), added up by smemFp16ArraySum and over the blocks of a sequence (scratchBuffers)",
                    _rounds_parts,
                ),
            ),
        ),
        distributions=(PACKAGE, "apache-tvm-ffi"),
        devices=("cuda",),
        summary="FlashInfer's TensorRT-LLM kernels; on SM 9.0 XQA for decode and verify",
        source=__file__,
        more_sources=(wrappers_file.__file__, lists_file.__file__),
    )
)
