"""Row ``flex``: torch FlexAttention with the whole physical pool as its key sequence and the page table in the mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.capabilities import Blocked, Capabilities, Conventions, RoundingStep
from attnmatrix.harness.lazy import torch
from attnmatrix.harness.registry import Row, register

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch
    from attnmatrix.harness.context import Context

QUERY_BLOCK = 128  # FlexAttention's default block size


@dataclass
class FlexTables:
    """What the mask reads; a key's *index* counts its request's slots, its *position* differs from it in draft trees only."""

    request_of: Tensor  # on gpu; int32 [T]
    key_index: Tensor  # on gpu; int32 [R, slots]; -1 where the slot is none of the request's
    first_token: Tensor  # on gpu; int32 [R]
    prefix: Tensor  # on gpu; int32 [R]
    positions: Tensor  # on gpu; int32 [T]
    ancestors: Tensor  # on gpu; bool [T, widest]


@dataclass
class FlexMetadata:
    tables: FlexTables
    block_masks: tuple[Any, ...]  # BlockMask per layer, its tensors on gpu
    cu_seqlens_q: Tensor  # on gpu; int32 [R + 1]

    def get_last_indices(self, bs: int) -> Tensor:
        return self.cu_seqlens_q[1 : bs + 1] - 1


class Flex(AttentionBackend):
    """One call per layer and batch; windows, trees and the page table are the mask, soft cap and ALiBi the score function. The scales of a
    quantised cache go into the softmax scale and onto the output: the function has no arguments for them."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        from torch.nn.attention import flex_attention as flex

        self._flex = flex
        cap = context.soft_cap
        self._soft_cap = None if cap is None else torch.tensor(cap, device=context.device)
        self._attend: Any = self._compiled() if context.device.type == "cuda" else flex.flex_attention

    def _compiled(self) -> Callable[..., Any]:
        """The fused kernel or an error, never the unfused fallback; one process may meet many geometries, each compiled anew."""
        limits: Any = torch._dynamo.config
        limits.recompile_limit = limits.accumulated_recompile_limit = 1024
        return torch.compile(self._flex.flex_attention, dynamic=True, fullgraph=True)

    def prepare_metadata(self, batch: Batch) -> None:
        tables = self._tables(batch)
        batch.attn_metadata = FlexMetadata(tables, self._block_masks(tables), batch.cu_seqlens_q)

    def _tables(self, batch: Batch) -> FlexTables:
        context = self.context
        assert context.kv is not None
        new = batch.cu_seqlens_q.diff()
        total = batch.seq_lens + new if batch.forward_mode.seq_lens_is_prefix else batch.seq_lens
        table = context.req_to_token[batch.req_pool_indices].long()
        index = torch.arange(table.shape[1], dtype=torch.int32, device=context.device).expand_as(table)
        spare = context.kv.num_slots  # a column for what lies beyond a request's length
        slots = torch.where(index < total[:, None], table, spare)
        key_index = torch.full((len(table), spare + 1), -1, dtype=torch.int32, device=context.device)
        key_index.scatter_(1, slots, index)
        tokens = torch.arange(batch.num_tokens, dtype=torch.int32, device=context.device)
        request_of = torch.searchsorted(batch.cu_seqlens_q, tokens, right=True, out_int32=True) - 1
        first = batch.cu_seqlens_q[:-1]
        if batch.forward_mode is ForwardMode.TARGET_VERIFY and batch.drafts is not None:
            ancestors = batch.drafts.ancestors
        else:
            own = tokens - first[request_of]
            ancestors = torch.arange(max((1, *batch.new_lens)), device=context.device)[None, :] <= own[:, None]
        return FlexTables(request_of, key_index[:, :spare].contiguous(), first.clone(), total - new, batch.positions.int(), ancestors)

    def _block_masks(self, tables: FlexTables) -> tuple[Any, ...]:
        """One block mask per layer, equal windows sharing theirs."""
        made: dict[int | None, Any] = {}
        tokens, slots = len(tables.request_of), tables.key_index.shape[1]
        for window in self.context.windows if tokens else ():
            if window not in made:
                made[window] = self._flex.create_block_mask(mask_of(tables, window), None, None, tokens, slots, device=self.context.device)
        return tuple(made[window] for window in self.context.windows) if tokens else ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return self.forward_with_lse(q, k, v, layer_id, batch)[0]

    def forward_with_lse(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> tuple[Tensor, Tensor]:
        context, meta = self.context, batch.attn_metadata
        assert context.kv is not None
        context.kv.store(layer_id, batch.out_loc, k, v)
        if not batch.num_tokens:
            return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        keys, values = (pool(layer_id).flatten(0, 1).transpose(0, 1)[None] for pool in (context.kv.k, context.kv.v))
        out, aux = self._attend(
            q.transpose(0, 1)[None],
            keys,
            values,
            score_mod=score_of(meta.tables, self._soft_cap, context.alibi_slopes),
            block_mask=meta.block_masks[layer_id],
            scale=context.scale * context.k_scale(layer_id),
            enable_gqa=context.heads.group > 1,
            kernel_options=self._kernel_options(batch),
            return_aux=self._flex.AuxRequest(lse=True),
        )
        lse = aux.lse
        if context.kv.quantised:
            out = out * context.v_scale(layer_id)
        if context.sinks is not None:
            sinks = context.sinks[None, :, None]
            out, lse = (out * torch.sigmoid(lse - sinks)[..., None]).to(q.dtype), torch.logaddexp(lse, sinks)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def _kernel_options(self, batch: Batch) -> dict[str, Any]:
        """Without the split-KV kernel, blocks that fit every dtype and head dim."""
        if _splits(batch.num_tokens, self.context.heads.group):
            return {}
        return {"FORCE_USE_FLEX_ATTENTION": True, "BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 2}

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        context, width = self.context, self.context.tokens_per_request
        assert context.kv is not None
        self._static: dict[int, FlexMetadata] = {}
        for size in batch_sizes:
            starts = torch.arange(size + 1, dtype=torch.int32, device=context.device) * width
            tokens = torch.arange(size * width, dtype=torch.int32, device=context.device)
            own = tokens % width
            tables = FlexTables(
                request_of=tokens // width,
                key_index=torch.zeros(size, context.kv.num_slots, dtype=torch.int32, device=context.device),
                first_token=starts[:-1].clone(),
                prefix=torch.zeros(size, dtype=torch.int32, device=context.device),
                positions=own.clone(),
                ancestors=torch.arange(width, device=context.device)[None, :] <= own[:, None],
            )
            self._static[size] = FlexMetadata(tables, self._block_masks(tables), starts)

    def prepare_for_capture(self, batch: Batch) -> None:
        batch.attn_metadata = self._static[batch.padded_reqs]

    def prepare_for_replay(self, batch: Batch) -> None:
        static, fresh = self._static[batch.padded_reqs], batch.attn_metadata
        for name in (field.name for field in fields(FlexTables)):
            getattr(static.tables, name).copy_(getattr(fresh.tables, name))
        for old, new in zip(static.block_masks, fresh.block_masks, strict=True):
            for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
                getattr(old, name).copy_(getattr(new, name))


def _splits(tokens: int, group: int) -> bool:
    """Whether FlexAttention's split-KV kernel takes a batch: it has no configuration beyond one block of queries, and is not asked where
    the query heads of a key head are no power of two."""
    return tokens * group <= QUERY_BLOCK and group & (group - 1) == 0


def mask_of(tables: FlexTables, window: int | None) -> Callable[..., Tensor]:
    """Whether token ``token`` may see the key in ``slot``."""
    request_of, key_index, first_token = tables.request_of, tables.key_index, tables.first_token
    prefix, positions, ancestors = tables.prefix, tables.positions, tables.ancestors

    def mask(b: Tensor, h: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        request = request_of[token]
        index = key_index[request, slot]
        draft = (index - prefix[request]).clamp(0, ancestors.shape[1] - 1)
        cached = index < prefix[request]
        seen = (index >= 0) & (cached | ancestors[token, draft])
        if window is not None:
            position = torch.where(cached, index, positions[first_token[request] + draft])
            seen = seen & (positions[token] - position < window)
        return seen

    return mask


def score_of(tables: FlexTables, soft_cap: Tensor | None, alibi_slopes: Tensor | None) -> Callable[..., Tensor] | None:
    """Soft cap (a 0-d tensor: compiled code takes no Python float that varies), then ALiBi; None when there is neither."""
    if soft_cap is None and alibi_slopes is None:
        return None
    request_of, key_index, first_token = tables.request_of, tables.key_index, tables.first_token
    prefix, positions, ancestors = tables.prefix, tables.positions, tables.ancestors

    def modify(score: Tensor, b: Tensor, h: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        if alibi_slopes is not None:
            request = request_of[token]
            index = key_index[request, slot]
            draft = (index - prefix[request]).clamp(0, ancestors.shape[1] - 1)
            position = torch.where(index < prefix[request], index, positions[first_token[request] + draft])
            score = score + alibi_slopes[h] * (position - positions[token])
        return score

    return modify


SINK = RoundingStep(
    "output rounded once before the sink rescales it",
    "flex_attention has no argument for sinks: the row scales its output by sigmoid(lse - sink)",
    lambda case, device: case.sinks,
)
CONVENTIONS = Conventions(
    tail_may_hold_nan=False, unreferenced_may_hold_nan=False, padding_may_hold_nan=False, window_may_hold_nan=False, rounding=(SINK,)
)  # a hidden key keeps weight 0, and 0 times NaN is NaN


def _compiler_limits(case: Case) -> Blocked | None:
    if case.has_wide_pool and _splits(case.num_tokens, case.heads.group):
        return Blocked(
            "the split-KV kernel mixes 64 and 32 bits where offsets in the pool need 64: it does not compile",
            "InductorError",
            "inconsistent types int64 and int32",
        )
    return None


register(
    Row(
        name="flex",
        kind=AttentionKind.SOFTMAX,
        create=Flex,
        capabilities=Capabilities(compiler_limits=_compiler_limits),
        conventions=CONVENTIONS,
        summary="FlexAttention, compiled on a GPU; page table in the mask",
        slow_on_cpu=True,
        few_on_cpu=True,
        source=__file__,
    )
)
