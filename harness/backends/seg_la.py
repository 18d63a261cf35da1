"""Row ``seg_la``: SGLang's segmented linear-attention kernels (Lightning attention), without the package around them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.capabilities import Blocked, Capabilities, Claim, Conventions, KnownFault, NotApplicable, RoundingStep
from attnmatrix.harness.installed import installed_file, load_file
from attnmatrix.harness.interpreter import prepare_triton
from attnmatrix.harness.lazy import torch
from attnmatrix.harness.registry import Row, register

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch, DraftTree
    from attnmatrix.harness.context import Context

PROMPTS = (ForwardMode.EXTEND, ForwardMode.MIXED)
SUM_KERNEL = 2048  # tokens from which a kernel adds the partial sums
DECODE_DIM = 128  # the decode kernel's K split: smaller heads leave it without a program


@dataclass
class SegLaMetadata:
    kernel: Any  # SegLaMeta, its tensors on gpu
    cache_indices: Tensor  # on gpu; int32 [R]; row of the intermediate states
    tracks: dict[str, Tensor] = field(default_factory=dict)  # on gpu; track_lens and track_state_indices, int32 [R], if any

    def get_last_indices(self, bs: int) -> Tensor:
        return self.kernel.q_offsets[1 : bs + 1] - 1


class SegLa(AttentionBackend):
    """``seg_la_fwd`` chooses among its prefill, decode and draft kernels; the row hands it every batch alike."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        prepare_triton(context.device, interpreted=True)
        from attnmatrix.harness.scratch import fenced_scratch

        self._fenced_scratch = fenced_scratch
        self._module = load_file("sglang", "seg_la.py")

    def prepare_metadata(self, batch: Batch) -> None:
        assert batch.state_indices is not None
        lengths = batch.cu_seqlens_q.diff()
        prefix = batch.seq_lens if batch.forward_mode.seq_lens_is_prefix else batch.seq_lens - lengths
        mask = _tree_mask(batch.drafts, batch.new_lens) if batch.drafts is not None and not batch.drafts.is_chain else None
        kernel = self._module.SegLaMeta(
            batch_size=batch.padded_reqs,
            max_q_length=max(batch.new_lens, default=0),
            q_offsets=batch.cu_seqlens_q,
            s_offsets=batch.state_indices,
            q_lengths=lengths,
            s_scales=(prefix > 0).int(),
            mask=mask,
        )
        rows = torch.arange(batch.padded_reqs, dtype=torch.int32, device=self.context.device)
        tracks = {"track_lens": batch.track_lens, "track_state_indices": batch.track_state_indices}
        batch.attn_metadata = SegLaMetadata(kernel, rows, {name: given for name, given in tracks.items() if given is not None})

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        context, meta = self.context, batch.attn_metadata
        assert context.states is not None
        assert context.slopes is not None
        if not batch.num_tokens:
            return torch.empty_like(q)
        verify = batch.forward_mode is ForwardMode.TARGET_VERIFY
        more = {"caches": context.states.intermediate(layer_id), "cache_indices": meta.cache_indices} if verify else meta.tracks
        with self._fenced_scratch() if batch.forward_mode in PROMPTS else nullcontext():
            return self._module.seg_la_fwd(
                q, k, v, context.states.state(layer_id), context.slopes[layer_id], meta.kernel, softmax_scale=context.scale, **more
            )

    def inspect_metadata(self, batch: Batch) -> PreparedMetadata:
        return PreparedMetadata(cu_seqlens_q=batch.attn_metadata.kernel.q_offsets)

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        device, width = self.context.device, self.context.tokens_per_request
        self._static: dict[int, SegLaMetadata] = {}
        for size in batch_sizes:
            kernel = self._module.SegLaMeta(
                batch_size=size,
                max_q_length=width,
                q_offsets=torch.arange(size + 1, dtype=torch.int32, device=device) * width,
                s_offsets=torch.full((size,), -1, dtype=torch.int32, device=device),
                q_lengths=torch.full((size,), width, dtype=torch.int32, device=device),
                s_scales=torch.ones(size, dtype=torch.int32, device=device),
            )
            self._static[size] = SegLaMetadata(kernel, torch.arange(size, dtype=torch.int32, device=device))

    def prepare_for_capture(self, batch: Batch) -> None:
        batch.attn_metadata = self._static[batch.padded_reqs]

    def prepare_for_replay(self, batch: Batch) -> None:
        static, fresh = self._static[batch.padded_reqs].kernel, batch.attn_metadata.kernel
        for name in ("q_offsets", "s_offsets", "q_lengths", "s_scales"):
            getattr(static, name).copy_(getattr(fresh, name))


def _tree_mask(drafts: DraftTree, new_lens: tuple[int, ...]) -> Tensor:
    """int32 ``[R, widest, widest]``: 1 where a draft token (row) may see a draft token (column) of its own request."""
    widest = drafts.ancestors.shape[1]
    mask = drafts.ancestors.new_zeros(len(new_lens), widest, widest)
    start = 0
    for row, new in enumerate(new_lens):
        mask[row, :new] = drafts.ancestors[start : start + new]
        start += new
    return mask.int()


def _one_token_kernel(case: Case) -> bool:
    """``seg_la_fwd`` takes its decode kernel for every batch of at most one new token per request on average."""
    return 0 < case.num_tokens <= case.batch_size


def _decode_takes_no_snapshot() -> bool:
    """The decode kernel has no argument for snapshots: its names in the kernel file, which is not imported for it."""
    source = installed_file("sglang", "seg_la.py").read_text()
    signature = source[source.index("def seg_la_d_kernel(") :].split("):", 1)[0]
    return "track" not in signature


def why_not(case: Case) -> Claim | None:
    """The limits of the kernels."""
    if case.forward is ForwardMode.DECODE and any(case.track_lens):
        return NotApplicable("decode has no argument for snapshots", _decode_takes_no_snapshot)
    if case.heads.group > 1:
        return Blocked("no GQA", "AssertionError", "seg_la does NOT support GQA")
    if case.heads.dim < DECODE_DIM and _one_token_kernel(case):
        return Blocked(f"decode needs head dim >= {DECODE_DIM}", "IndexError", "index 0 is out of bounds")
    return None


def _stale_state(case: Case, mode: RunnerMode) -> bool:
    return case.forward in PROMPTS and set(case.new_lens) == {1} and 0 in case.prefix_lens


def _uneven_lengths(case: Case, mode: RunnerMode) -> bool:
    return _one_token_kernel(case) and set(case.new_lens) != {1}


def _verify(case: Case) -> bool:
    return case.forward is ForwardMode.TARGET_VERIFY


def _split_heads(case: Case, mode: RunnerMode) -> bool:
    """The decode kernel takes 128 key dims a program and as many programs as fit: what is left over belongs to none."""
    return _one_token_kernel(case) and case.heads.dim > DECODE_DIM and case.heads.dim % DECODE_DIM != 0


def _sums_odd_width(case: Case, mode: RunnerMode) -> bool:
    """From 2,048 tokens on a kernel adds the partial sums, over all heads' columns at once."""
    width = case.heads.q * case.heads.dim
    summed = case.num_tokens >= SUM_KERNEL and not _one_token_kernel(case) and case.heads.dim > 32
    return summed and width & (width - 1) != 0


def _snapshot_lost(case: Case, mode: RunnerMode) -> bool:
    """Blocks end at multiples of 32 tokens and at the end; no snapshot is taken elsewhere."""
    pairs = zip(case.track_lens, case.new_lens, strict=False)
    return not _one_token_kernel(case) and any(track % 32 and track < new for track, new in pairs)


def _snapshot_not_taken(case: Case, mode: RunnerMode) -> bool:
    return case.forward in PROMPTS and _one_token_kernel(case) and any(case.track_lens)


def _cut_columns(case: Case, mode: RunnerMode) -> bool:
    """Prompts and drafts of more than two requests split the value dim by 64, and drop what is left over."""
    return not _one_token_kernel(case) and case.batch_size > 2 and case.heads.dim % 64 != 0


FAULTS = (
    KnownFault(
        _sums_odd_width,
        finding="seg_la_long_prefill_of_three_heads_raises",
        diagnosis="raises: power of 2",
        reason="2,048 tokens and more are summed by a kernel over heads x dim columns, which must be a power of two; it raises after the "
        "states have advanced",
    ),
    KnownFault(
        _split_heads,
        finding="seg_la_decode_of_head_dim_192_drops_keys",
        diagnosis="unexplained",
        reason="decode takes 128 key dims a program, so head dim 192 leaves 64 key dims out of the output and of the state",
    ),
    KnownFault(
        _snapshot_lost,
        finding="seg_la_snapshot_inside_a_block_is_not_taken",
        diagnosis="Y83",
        reason="a snapshot is taken at multiples of 32 tokens and after the last one, elsewhere none is, without a word",
    ),
    KnownFault(
        _cut_columns,
        finding="seg_la_head_dim_96_leaves_columns_unwritten",
        diagnosis="unexplained",
        reason="more than two requests split the value dim by 64, so head dim 96 leaves 32 columns of output and state unwritten",
    ),
    KnownFault(
        _stale_state,
        finding="seg_la_one_token_extend_reads_stale_state",
        diagnosis="Y04",
        reason="one new token per request takes the decode kernel, which starts from the slot's old state without a prefix too",
    ),
    KnownFault(
        _snapshot_not_taken,
        finding="seg_la_snapshot_of_single_tokens_is_not_taken",
        diagnosis="Y81",
        reason="one new token per request takes the decode kernel, which takes no snapshot",
    ),
    KnownFault(
        _uneven_lengths,
        finding="seg_la_uneven_lengths_take_decode_kernel",
        diagnosis="Y04",
        reason="lengths such as (2, 0) add up to the batch size and take the decode kernel, one token per request",
    ),
    KnownFault(
        lambda case, mode: _verify(case) and set(case.new_lens) == {1},
        finding="seg_la_verify_of_one_draft_updates_live_state",
        diagnosis="Y59",
        reason="verify of one draft token takes the decode kernel: the live state advances, no intermediate state is written",
    ),
    KnownFault(
        lambda case, mode: _verify(case) and len(set(case.new_lens)) > 1,
        finding="seg_la_ragged_verify_reads_other_requests",
        diagnosis="Y60",
        reason="verify divides the tokens evenly among the requests, whatever q_lengths says",
    ),
    KnownFault(
        lambda case, mode: _verify(case) and bool(case.trees),
        finding="seg_la_verify_ignores_tree_mask",
        diagnosis="B139",
        reason="with intermediate states asked for, the tree mask is ignored and the drafts are taken as a chain",
    ),
)

ROUNDING = (
    RoundingStep(
        "partial sums of 32 key dims in the input dtype",
        "seg_la_fwd: K_SPLIT_DIM = 32, tmp = torch.empty((k_dim_block, ...), dtype=q.dtype), o = tmp.sum(0)",
        lambda case, device: not _one_token_kernel(case),
    ),
    RoundingStep(
        "partial sums of 128 key dims in the input dtype",
        "seg_la_fwd, decode: K_SPLIT_DIM = 128, tmp = torch.empty((k_dim_block, ...), dtype=q.dtype), o = tmp.sum(0)",
        lambda case, device: _one_token_kernel(case) and case.heads.dim >= 2 * DECODE_DIM,
    ),
    RoundingStep(
        "products of factors cut to TF32",
        "seg_la_p_kernel: tl.dot(q, k), tl.dot(qk, v), tl.dot(q, state) and tl.dot(k, v) of float32 operands",
        lambda case, device: device == "cuda" and not _one_token_kernel(case) and not _verify(case),
    ),
)

SNIPPET = """
import importlib.metadata, importlib.util, sys
path = next(file.locate() for file in importlib.metadata.files("sglang") if file.name == "seg_la.py")
spec = importlib.util.spec_from_file_location("seg_la", path)
kernels = sys.modules["seg_la"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)

def attend(q, k, v, states, slots, starts, prefix, new, slopes, scale):
    has_prefix = torch.tensor([int(p > 0) for p in prefix], dtype=torch.int32, device=q.device)
    meta = kernels.SegLaMeta(len(new), max(new), starts, slots, starts.diff(), has_prefix)
    return kernels.seg_la_fwd(q, k, v, states, slopes, meta, softmax_scale=scale)
"""

register(
    Row(
        name="seg_la",
        kind=AttentionKind.LIGHTNING,
        create=SegLa,
        capabilities=Capabilities(why_not=why_not, known_faults=FAULTS),
        conventions=Conventions(rounding=ROUNDING),
        distributions=("sglang", "triton"),
        interpreted=True,
        summary="segmented linear attention, Triton",
        snippet=SNIPPET,
        source=__file__,
    )
)
