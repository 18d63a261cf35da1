"""Row ``sgl-lightning``: SGLang's ``LightningAttentionBackend``, the class that an engine drives, around the kernels of row ``seg_la``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness import sglang_engine, wheel_modules
from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.backends import seg_la
from attnmatrix.harness.capabilities import Blocked, Capabilities, Claim, Conventions, NotApplicable
from attnmatrix.harness.installed import installed_file
from attnmatrix.harness.interpreter import prepare_triton
from attnmatrix.harness.lazy import torch
from attnmatrix.harness.registry import Row, register
from attnmatrix.harness.sglang_engine import Pools, Settings, build_backend, load_engine

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch
    from attnmatrix.harness.context import Context

RANKS = (1, 2, 4, 8)  # tensor-parallel sizes of which a context's heads may be a slice
CAPTURED = (RunnerMode.DE_CG, RunnerMode.DE_V2_CG, RunnerMode.EAGLE_DE)


@dataclass
class EngineMetadata:
    """What the class planned for one batch. In graph modes these are the buffers that it keeps for the padded size."""

    backend: Any  # LightningAttentionBackend
    forward_batch: Any  # ForwardBatch
    planned: Any  # BailingLinearMetadata, its tensors on gpu

    def get_last_indices(self, bs: int) -> Tensor:
        last: Tensor = self.planned.query_start_loc[1 : bs + 1] - 1
        return last


class SglLightning(AttentionBackend):
    """The class keeps one plan at a time: it is put back before a layer runs, as batches may be prepared ahead."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        prepare_triton(context.device, interpreted=True)
        from attnmatrix.harness.scratch import fenced_scratch

        self._fenced_scratch = fenced_scratch
        self._engine, self._pools = load_engine(), Pools(context)
        self._backends: dict[int, Any] = {}
        heads = context.heads
        self._layers = [
            SimpleNamespace(layer_id=layer, tp_q_head_num=heads.q, head_dim=heads.dim, v_head_dim=heads.dim, scaling=context.scale)
            for layer in range(context.num_layers)
        ]

    def prepare_metadata(self, batch: Batch) -> None:
        backend, given = self._backend(batch), self._forward_batch(batch)
        self._tell_slots(batch)
        backend.init_forward_metadata(given)
        batch.attn_metadata = EngineMetadata(backend, given, backend.forward_metadata)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        meta = batch.attn_metadata
        if not batch.num_tokens:
            return torch.empty_like(q).flatten(1)
        meta.backend.forward_metadata = meta.planned
        with self._fenced_scratch() if batch.forward_mode in seg_la.PROMPTS else nullcontext():
            out: Tensor = meta.backend.forward(q, k, v, self._layers[layer_id], meta.forward_batch)
        return out

    def inspect_metadata(self, batch: Batch) -> PreparedMetadata:
        return PreparedMetadata(cu_seqlens_q=batch.attn_metadata.planned.query_start_loc)

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        self._largest = max(batch_sizes)

    def prepare_for_capture(self, batch: Batch) -> None:
        backend, given = self._backend(batch), self._forward_batch(batch)
        if not backend.state_indices_list:
            backend.init_cuda_graph_state(self._largest, self._largest * self.context.tokens_per_request)
        self._tell_slots(batch)
        backend.init_forward_metadata_out_graph(given, in_capture=True)
        batch.attn_metadata = EngineMetadata(backend, given, backend.forward_metadata)

    def prepare_for_replay(self, batch: Batch) -> None:
        meta = batch.attn_metadata
        meta.forward_batch.num_padding = batch.padded_reqs - batch.size
        meta.backend.init_forward_metadata_out_graph(meta.forward_batch)
        meta.planned = meta.backend.forward_metadata

    def _backend(self, batch: Batch) -> Any:
        """An engine is started for chains or for trees: with topk 1, or 2 for any tree (0: without drafts)."""
        topk = 0 if batch.drafts is None else 1 if batch.drafts.is_chain else 2
        if topk not in self._backends:
            self._backends[topk] = self._build(topk)
        return self._backends[topk]

    def _build(self, topk: int) -> Any:
        """For the slice of a model whose slopes come nearest to these; its heads in the order of these, its values its own."""
        slices = (Settings(topk, rank, ranks) for ranks in RANKS for rank in range(ranks))
        built = (build_backend(self._engine, self.context, self._pools, settings) for settings in slices)
        backend, order = min(((each, self._order(each)) for each in built), key=lambda pair: self._distance(*pair))
        backend.tp_slope = [slope[order] for slope in backend.tp_slope]
        return backend

    def _order(self, backend: Any) -> Tensor:
        """int64 ``[H]``: the class's head whose slope is nearest to each of these."""
        assert self.context.slopes is not None
        return (backend.tp_slope[0].flatten()[None, :] - self.context.slopes[0][:, None]).abs().argmin(dim=1)

    def _distance(self, backend: Any, order: Tensor) -> float:
        assert self.context.slopes is not None
        own = torch.stack([slope.flatten()[order] for slope in backend.tp_slope])
        return float((own - self.context.slopes).abs().max())

    def _tell_slots(self, batch: Batch) -> None:
        """The engine's table of state slots, for the rows of this batch."""
        assert batch.state_indices is not None
        self._pools.slots[batch.req_pool_indices[: batch.size]] = batch.state_indices[: batch.size]

    def _forward_batch(self, batch: Batch) -> Any:
        modes, device = self._engine.forward_mode, self.context.device
        given = self._engine.forward_batch(
            forward_mode=getattr(modes, batch.forward_mode.name),
            batch_size=batch.padded_reqs,
            input_ids=torch.zeros(batch.num_tokens, dtype=torch.int64, device=device),
            req_pool_indices=batch.req_pool_indices.clone(),  # the class zeroes the rows of padding
            seq_lens=batch.seq_lens,
            seq_lens_cpu=None,
            out_cache_loc=batch.out_loc,
            seq_lens_sum=sum(batch.kv_lens),
            positions=batch.positions,
        )
        if batch.forward_mode in seg_la.PROMPTS:
            new = batch.cu_seqlens_q.diff()
            given.extend_seq_lens, given.extend_seq_lens_cpu = new, list(batch.new_lens)
            given.extend_prefix_lens, given.extend_prefix_lens_cpu = batch.seq_lens - new, list(batch.prefix_lens)
            given.extend_start_loc, given.extend_num_tokens = batch.cu_seqlens_q[:-1], batch.num_tokens
        if batch.drafts is not None:
            given.spec_info = SimpleNamespace(draft_token_num=max(batch.new_lens, default=1), ragged_verify_layout=None)
            if len(set(batch.new_lens)) > 1:
                given.spec_info.ragged_verify_layout = SimpleNamespace(qo_indptr_device=batch.cu_seqlens_q)
        return given


def _tracks_chunk_ends() -> bool:
    """The class rounds the length of a snapshot down to the end of a chunk: there is no argument for another token."""
    source = installed_file("sglang", "lightning_backend.py").read_text()
    return "(lens_to_track // chunk_size) * chunk_size" in source


def _is_tree(case: Case) -> bool:
    return any(case.tree(r) != tuple(range(-1, new - 1)) for r, new in enumerate(case.new_lens))


def _why_not(case: Case) -> Claim | None:
    if any(case.track_lens):
        return NotApplicable("snapshots are taken at the ends of chunks, not after a given token", _tracks_chunk_ends)
    if case.forward is ForwardMode.TARGET_VERIFY and _is_tree(case):
        return Blocked("topk > 1", "NotImplementedError", "--speculative-eagle-topk 1")
    return seg_la.why_not(case)


GRAPHS = Blocked("graphs hold decode, idle and verify batches only", "ValueError", "Invalid forward mode")

register(
    Row(
        name="sgl-lightning",
        kind=AttentionKind.LIGHTNING,
        create=SglLightning,
        capabilities=Capabilities(modes=dict.fromkeys(CAPTURED, GRAPHS), why_not=_why_not, known_faults=seg_la.FAULTS),
        conventions=Conventions(output="flat", rounding=seg_la.ROUNDING),
        distributions=("sglang", "triton"),
        interpreted=True,
        few_on_cpu=True,
        summary="SGLang's LightningAttentionBackend class over its seg_la kernels",
        source=__file__,
        more_sources=(sglang_engine.__file__, wheel_modules.__file__, seg_la.__file__),
    )
)
