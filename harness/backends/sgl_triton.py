"""Row ``sgl-triton``: SGLang's Triton kernels, ``extend_attention_fwd`` for prompts and drafts, ``decode_attention_fwd`` (split KV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness import draft_masks, wheel_modules
from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.capabilities import Capabilities, Conventions, Deferred, KnownFault, RoundingStep
from attnmatrix.harness.draft_masks import draft_bias, draft_mask, starts_of, window_hides_by_index
from attnmatrix.harness.interpreter import prepare_triton
from attnmatrix.harness.lazy import torch
from attnmatrix.harness.registry import Row, register

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device

    from attnmatrix.harness.batch import Batch
    from attnmatrix.harness.context import Context

KERNELS = "sglang.kernels.ops.attention"
MODULES = ("extend_attention", "decode_attention", "kv_indices", "metadata", "score_mod")
MAX_KV_SPLITS = {"cuda": 8, "cpu": 2}  # sglang's default of --triton-attention-num-kv-splits; interpreted, the fewest that are merged
SCHEDULED = 256  # requests of a batch that one launch of the split schedule takes, at least


@dataclass
class Rail:
    """The slots that a layer reads for each request: all cached ones, or those of its window."""

    kv_indptr: Tensor  # on gpu; int32 [R + 1]
    kv_indices: Tensor  # on gpu; int64 [keys]
    offsets: Tensor  # on gpu; int32 [R]; position of each request's first key
    splits: Tensor  # on gpu; int32 [R]; decode: how many programs share a request's keys


@dataclass
class SglMetadata:
    rails: dict[int | None, Rail]  # by window
    qo_indptr: Tensor  # on gpu; int64 [R + 1]
    max_new: int  # on cpu
    logits: Tensor  # on gpu; float32 [R, Hq, splits, D]; decode: results of the splits
    lse: Tensor  # on gpu; float32 [R, Hq, splits]
    mask: Tensor | None  # on gpu; uint8, verify: per request [new, prefix + new], one behind the other
    mask_indptr: Tensor | None  # on gpu; int64 [R + 1]
    bias: Tensor | None  # on gpu; float32 [T, Hq, distance]; what is added to the score of a key that far behind the token

    def get_last_indices(self, bs: int) -> Tensor:
        return self.qo_indptr[1 : bs + 1] - 1


class SglTriton(AttentionBackend):
    """One kernel call per layer and batch; the page table goes in as one slot per key, gathered by the package's own kernel."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        prepare_triton(context.device, interpreted=True)
        names = ("sglang.srt.environ", *(f"{KERNELS}.{name}" for name in MODULES))
        loaded = wheel_modules.load_modules("sglang", names, {"sglang.srt.utils": _device_facts()})
        self._extend, self._decode, self._kv_indices, self._schedule, self._score_mod = (loaded[f"{KERNELS}.{name}"] for name in MODULES)
        self._cores, self._max_splits = core_count(context.device), MAX_KV_SPLITS[context.device.type]
        self._early_launch = context.device.type == "cuda" and torch.cuda.get_device_capability(context.device)[0] >= 9
        slopes = context.alibi_slopes
        distance = torch.arange(context.max_seq_len, device=context.device)
        self._behind = None if slopes is None else -slopes[:, None] * distance

    def prepare_metadata(self, batch: Batch) -> None:
        context, rows = self.context, batch.padded_reqs
        new = batch.cu_seqlens_q.diff()
        prefix = batch.seq_lens if batch.forward_mode.seq_lens_is_prefix else batch.seq_lens - new
        splits = rows if batch.forward_mode is ForwardMode.DECODE else 0
        drafts = batch.forward_mode is ForwardMode.TARGET_VERIFY and batch.drafts is not None and batch.num_tokens > 0
        mask, mask_indptr = draft_mask(batch, prefix, new) if drafts else (None, None)
        bias = self._behind
        if bias is not None and context.alibi_slopes is not None:
            bias = (
                draft_bias(batch, prefix, context.alibi_slopes, context.max_seq_len)
                if drafts
                else bias.expand(batch.num_tokens, *bias.shape)
            )
        batch.attn_metadata = SglMetadata(
            rails={window: self._rail(batch, prefix, window) for window in dict.fromkeys(context.windows)},
            qo_indptr=batch.cu_seqlens_q.long(),
            max_new=max(batch.new_lens, default=0),
            logits=torch.empty(splits, context.heads.q, self._max_splits, context.heads.dim, dtype=torch.float32, device=context.device),
            lse=torch.empty(splits, context.heads.q, self._max_splits, dtype=torch.float32, device=context.device),
            mask=mask,
            mask_indptr=mask_indptr,
            bias=bias,
        )

    def _rail(self, batch: Batch, prefix: Tensor, window: int | None) -> Rail:
        """Cached keys within reach of the first new token; in decode the new token's own key too, which the pool holds by then."""
        context, rows, table = self.context, batch.padded_reqs, self.context.req_to_token
        decode = batch.forward_mode is ForwardMode.DECODE
        reads = prefix + 1 if decode else prefix
        kept = reads if window is None else reads.clamp(max=window + 1 if decode else window)
        indptr, offsets = starts_of(kept).int(), reads - kept
        indices = torch.empty(int(indptr[-1]), dtype=torch.int64, device=context.device)
        if len(indices):
            build = self._kv_indices.create_flashinfer_kv_indices_triton
            build[(rows,)](table, batch.req_pool_indices, kept, indptr, offsets, indices, table.stride(0))
        splits = torch.full((rows,), self._max_splits, dtype=torch.int32, device=context.device)
        if decode and self._cores and rows:
            heads, room = context.heads, max(SCHEDULED, 1 << (rows - 1).bit_length())
            schedule = self._schedule.get_num_kv_splits_triton
            schedule[(1,)](splits, kept, rows, 1, heads.q, heads.kv, self._max_splits, self._cores, MAX_NUM_SEQ=room)
        return Rail(indptr, indices, offsets, splits)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        context, meta = self.context, batch.attn_metadata
        assert context.kv is not None
        context.kv.store(layer_id, batch.out_loc, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not batch.num_tokens:
            return out
        keys, values = (pool(layer_id).view(-1, *k.shape[1:]) for pool in (context.kv.k, context.kv.v))
        window, scales = context.windows[layer_id], (context.k_scale(layer_id), context.v_scale(layer_id))
        rail = meta.rails[window]
        options: dict[str, Any] = {"logit_cap": context.soft_cap or 0.0, "sinks": context.sinks, "page_size": context.page_size}
        if meta.bias is not None:
            options.update(score_mod=self._score_mod.relative_bias_score_mod, aux_tensors=[meta.bias])
        if batch.forward_mode is ForwardMode.DECODE:
            self._decode.decode_attention_fwd(
                q, keys, values, out, rail.kv_indptr, rail.kv_indices, meta.logits, meta.lse, rail.splits, self._max_splits,
                context.scale, *scales, use_pdl=self._early_launch, **options,
            )  # fmt: skip
            return out
        self._extend.extend_attention_fwd(
            q, k.contiguous(), v.contiguous(), out, keys, values, meta.qo_indptr, rail.kv_indptr, rail.kv_indices, meta.mask, True,
            meta.mask_indptr, meta.max_new, *scales, context.scale,
            sliding_window_size=-1 if window is None else window, window_kv_offsets=rail.offsets, **options,
        )  # fmt: skip
        return out

    def inspect_metadata(self, batch: Batch) -> PreparedMetadata:
        meta = batch.attn_metadata
        rail = meta.rails.get(None) if batch.forward_mode is ForwardMode.DECODE else None
        indptr, indices = (None, None) if rail is None else (rail.kv_indptr, rail.kv_indices)
        return PreparedMetadata(cu_seqlens_q=meta.qo_indptr, kv_indptr=indptr, kv_indices=indices)

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        context, width, device = self.context, self.context.tokens_per_request, self.context.device
        decode = context.forward_mode is ForwardMode.DECODE

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._static: dict[int, SglMetadata] = {}
        for size in batch_sizes:
            starts = torch.arange(size + 1, dtype=torch.int64, device=device)
            rails = {
                window: Rail(
                    (starts * int(decode)).int(),
                    zeros(size * max_seq_len, dtype=torch.int64),
                    zeros(size, dtype=torch.int32),
                    torch.full((size,), self._max_splits, dtype=torch.int32, device=device),
                )
                for window in dict.fromkeys(context.windows)
            }
            bias = self._behind
            if bias is not None:
                bias = bias.expand(size, *bias.shape) if decode else zeros(size * width, *bias.shape)
            splits = (size if decode else 0, context.heads.q, self._max_splits)
            self._static[size] = SglMetadata(
                rails,
                starts * width,
                width,
                zeros(*splits, context.heads.dim),
                zeros(*splits),
                None if decode else torch.ones(size * width * (max_seq_len + width), dtype=torch.uint8, device=device),
                None if decode else starts * width**2,
                bias,
            )

    def prepare_for_capture(self, batch: Batch) -> None:
        batch.attn_metadata = self._static[batch.padded_reqs]

    def prepare_for_replay(self, batch: Batch) -> None:
        static, fresh = self._static[batch.padded_reqs], batch.attn_metadata
        for window, rail in static.rails.items():
            for name in (field.name for field in fields(Rail)):
                _copy_first(getattr(rail, name), getattr(fresh.rails[window], name))
        static.qo_indptr.copy_(fresh.qo_indptr)
        if static.mask is not None and static.mask_indptr is not None:
            _copy_first(static.mask, fresh.mask)
            static.mask_indptr.copy_(fresh.mask_indptr)
            if static.bias is not None:
                static.bias.copy_(fresh.bias)


def _copy_first(static: Tensor, fresh: Tensor) -> None:
    static[: len(fresh)].copy_(fresh)


def core_count(device: Device) -> int:
    """Multiprocessors, over which sglang spreads the splits; none on a CPU, where it takes them all."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def _device_facts() -> ModuleType:
    """What the kernels' files ask of ``sglang.srt.utils``, which imports the engine: where they are about to run."""
    made = ModuleType("sglang.srt.utils")
    facts = {
        "is_cuda": lambda: torch.cuda.is_available() and torch.version.cuda is not None,
        "is_hip": lambda: torch.version.hip is not None,
        "is_gfx95_supported": lambda: False,
        "is_gfx1250_supported": lambda: False,
        "get_device_core_count": lambda index=0: core_count(torch.device("cuda", index)),
    }
    vars(made).update(facts)
    return made


def _interpreter_limits(case: Case) -> Deferred | None:
    if case.dtype == "bf16" and case.num_tokens:
        return Deferred(
            "Triton's interpreter multiplies the bit patterns of bf16", issue="triton/runtime/interpreter.py: bfloat16 is stored as uint16"
        )
    return None


def _why_not(case: Case) -> Deferred | None:
    if case.kv_dtype is not None and case.num_tokens and not _by_elements(case):
        return Deferred(
            "with an fp8 cache queries and weights are rounded to fp8 too, and an extend reads its new keys unquantised: not modelled",
            issue="sglang/kernels/ops/attention: qk = tl.dot(q.to(k.dtype), k) and tl.dot(p.to(v.dtype), v)",
        )
    return None


def _one_key_window(case: Case, mode: RunnerMode) -> bool:
    return case.window == 1 and case.forward is not ForwardMode.DECODE and max(case.new_lens, default=0) > 1


def _by_elements(case: Case) -> bool:
    """Decode with a key/value head for every query head takes a kernel without matrix products."""
    return case.forward is ForwardMode.DECODE and case.heads.group == 1


ROUNDING = (
    RoundingStep(
        "products of a query's and a key's elements in the input dtype",
        "decode_attention.py, _fwd_kernel_stage1: qk = tl.sum((q[None, :] * k).to(tl.float32), 1)",
        lambda case, device: _by_elements(case) and case.dtype != "fp32",
    ),
    RoundingStep(
        "products of factors cut to TF32",
        "extend_attention.py, _fwd_kernel, and decode_attention.py, _fwd_grouped_kernel_stage1: tl.dot of float32 operands",
        lambda case, device: device == "cuda" and case.dtype == "fp32" and not _by_elements(case),
    ),
)


register(
    Row(
        name="sgl-triton",
        kind=AttentionKind.SOFTMAX,
        create=SglTriton,
        capabilities=Capabilities(
            why_not=_why_not,
            interpreter_limits=_interpreter_limits,  # type: ignore[arg-type]  # wrong there without a refusal
            known_faults=(
                KnownFault(
                    _one_key_window,
                    finding="sgl_triton_window_of_one_key_is_none",
                    diagnosis="undefined",
                    reason="sliding_window_size=0, the query's own key alone, is taken for no window by the kernel that extends and verifies",
                ),
                KnownFault(
                    window_hides_by_index,
                    finding="sgl_triton_window_counts_draft_index",
                    diagnosis="X35",
                    reason="the window of a draft token is counted from its index among the drafts, not from its depth in the tree",
                ),
            ),
        ),
        conventions=Conventions(window="exclusive", rounding=ROUNDING),
        distributions=("sglang", "triton"),
        interpreted=True,
        summary="SGLang's Triton extend and split-KV decode kernels",
        source=__file__,
        more_sources=(wheel_modules.__file__, draft_masks.__file__),
    )
)
