"""Row ``torch``: scaled_dot_product_attention per request, and padded to the longest for decode. The subject that needs no package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnmatrix.cases.case import AttentionKind, ForwardMode
from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.lazy import torch
from attnmatrix.harness.registry import Row, register

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch


@dataclass
class ExtendMetadata:
    cu_seqlens_q: Tensor  # on gpu
    spans: tuple[tuple[int, int], ...]  # on cpu; rows of q per request
    slots: tuple[Tensor, ...]  # on gpu; [kv] per request

    def get_last_indices(self, bs: int) -> Tensor:
        return self.cu_seqlens_q[1 : bs + 1] - 1


@dataclass
class UniformMetadata:
    """Decode, and verify with the same number of drafts everywhere: ``width`` tokens per request."""

    width: int
    prefix: Tensor  # on gpu; int32 [R]
    slots: Tensor  # on gpu; int64 [R, L]
    ancestors: Tensor  # on gpu; bool [R, width, width]
    cu_seqlens_q: Tensor  # on gpu

    def get_last_indices(self, bs: int) -> Tensor:
        return self.cu_seqlens_q[1 : bs + 1] - 1


class TorchSoftmax(AttentionBackend):
    """Extend gathers each request's keys and runs one SDPA per request; uniform batches are padded to the longest."""

    def prepare_metadata(self, batch: Batch) -> None:
        uniform = batch.forward_mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY) and len(set(batch.new_lens)) == 1
        batch.attn_metadata = self._uniform(batch) if uniform else self._extend(batch)

    def _extend(self, batch: Batch) -> ExtendMetadata:
        rows = batch.req_pool_indices.tolist()
        slots = tuple(self.context.req_to_token[row, :n].long() for row, n in zip(rows, batch.kv_lens, strict=True))
        ends, start = [], 0
        for new in batch.new_lens:
            ends.append((start, start + new))
            start += new
        return ExtendMetadata(batch.cu_seqlens_q, tuple(ends), slots)

    def _uniform(self, batch: Batch) -> UniformMetadata:
        width = batch.new_lens[0]
        table = self.context.req_to_token[batch.req_pool_indices, : max(batch.kv_lens)].long()
        verify = batch.forward_mode is ForwardMode.TARGET_VERIFY
        ones = torch.ones(batch.padded_reqs, 1, 1, dtype=torch.bool, device=self.context.device)
        ancestors = batch.drafts.ancestors.view(-1, width, width) if verify and batch.drafts else ones
        return UniformMetadata(width, batch.seq_lens if verify else batch.seq_lens - 1, table, ancestors, batch.cu_seqlens_q)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        assert self.context.kv is not None
        self.context.kv.store(layer_id, batch.out_loc, k, v)
        if isinstance(batch.attn_metadata, UniformMetadata):
            return self._forward_uniform(q, layer_id, batch, batch.attn_metadata)
        return self._forward_extend(q, layer_id, batch, batch.attn_metadata)

    def _forward_extend(self, q: Tensor, layer: int, batch: Batch, meta: ExtendMetadata) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for request, ((start, stop), slots) in enumerate(zip(meta.spans, meta.slots, strict=True)):
            if start == stop:
                continue
            prefix = batch.prefix_lens[request]
            positions = batch.positions[start:stop]
            keys = torch.cat([torch.arange(prefix, device=q.device), positions])
            visible = (torch.arange(len(keys), device=q.device)[None, :] - prefix) <= torch.arange(stop - start, device=q.device)[:, None]
            if batch.drafts is not None:
                visible[:, prefix:] = batch.drafts.ancestors[start:stop, : stop - start]
            distance = keys[None, :] - positions[:, None]
            out[start:stop] = self._attend(q[None, start:stop], slots[None], visible[None], distance[None], layer)[0]
        return out

    def _forward_uniform(self, q: Tensor, layer: int, batch: Batch, meta: UniformMetadata) -> Tensor:
        rows, width = meta.prefix.shape[0], meta.width
        columns = torch.arange(meta.slots.shape[1], device=q.device)
        offset = columns[None, :] - meta.prefix[:, None]  # [R, L]; index among the draft tokens
        draft = offset.clamp(0, width - 1).long()
        seen = meta.ancestors.gather(2, draft[:, None, :].expand(rows, width, -1))
        visible = (offset < 0)[:, None] | (seen & ((offset >= 0) & (offset < width))[:, None])
        positions = batch.positions.view(rows, width)
        keys = torch.where(offset < 0, columns[None, :], positions.gather(1, draft))
        distance = keys[:, None, :] - positions[:, :, None]
        out = self._attend(q.unflatten(0, (rows, width)), meta.slots, visible, distance, layer)
        return out.flatten(0, 1)

    def _attend(self, q: Tensor, slots: Tensor, visible: Tensor, distance: Tensor, layer: int) -> Tensor:
        """``q`` ``[R, n, Hq, D]``, ``slots`` ``[R, L]``, ``visible`` and ``distance`` (key minus query position) ``[R, n, L]``."""
        context, window = self.context, self.context.windows[layer]
        assert context.kv is not None
        keys = self._gather(context.kv.k(layer), slots, context.k_scale(layer), q.dtype)
        values = self._gather(context.kv.v(layer), slots, context.v_scale(layer), q.dtype)
        if window is not None:
            visible = visible & (distance > -window)
        dead = ~visible.any(dim=1)[..., None, None]
        keys, values = keys.masked_fill(dead, 0.0), values.masked_fill(dead, 0.0)
        group = q.shape[2] // keys.shape[2]
        keys, values = (t.repeat_interleave(group, dim=2).transpose(1, 2) for t in (keys, values))
        query = q.transpose(1, 2)
        if context.soft_cap is None and context.sinks is None and context.alibi_slopes is None:
            out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible[:, None], scale=context.scale)
        else:
            out = self._explicit(query, keys, values, visible[:, None], distance[:, None])
        return out.transpose(1, 2)

    def _gather(self, pool: Tensor, slots: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """``[R, L, Hkv, D]``: what a physical tensor holds at ``slots``, multiplied by the scale of a quantised one."""
        kv, size = self.context.kv, self.context.page_size
        assert kv is not None
        held = kv.by_page(pool)[slots // size, slots % size]
        return (held.float() * scale).to(dtype) if kv.quantised else held

    def _explicit(self, q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, distance: Tensor) -> Tensor:
        """Score options that SDPA lacks, scores in float32: ``q``, ``keys``, ``values`` ``[R, Hq, n or L, D]``."""
        context = self.context
        score = (q.float() @ keys.float().transpose(-1, -2)) * context.scale
        if context.soft_cap is not None:
            score = context.soft_cap * torch.tanh(score / context.soft_cap)
        if context.alibi_slopes is not None:
            score = score + context.alibi_slopes[None, :, None, None] * distance
        score = score.masked_fill(~visible, float("-inf"))
        if context.sinks is not None:
            score = torch.cat([score, context.sinks[None, :, None, None].expand(*score.shape[:-1], 1)], dim=-1)
        weight = torch.softmax(score, dim=-1)[..., : keys.shape[2]]
        return (weight.to(q.dtype).float() @ values.float()).to(q.dtype)  # a product in bf16 takes weights below 2**-126 for 0

    def inspect_metadata(self, batch: Batch) -> PreparedMetadata:
        meta = batch.attn_metadata
        lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=self.context.device)
        slots = meta.slots if isinstance(meta, UniformMetadata) else torch.nn.utils.rnn.pad_sequence(list(meta.slots), batch_first=True)
        return PreparedMetadata(
            cu_seqlens_q=meta.cu_seqlens_q,
            cache_seqlens=lens if not isinstance(meta, UniformMetadata) else meta.prefix + meta.width,
            page_table=slots[:, :: self.context.page_size] // self.context.page_size,
            last_indices=meta.get_last_indices(batch.size),
        )

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        context, width = self.context, self.context.tokens_per_request
        self._static: dict[int, UniformMetadata] = {}
        for size in batch_sizes:
            self._static[size] = UniformMetadata(
                width,
                torch.zeros(size, dtype=torch.int32, device=context.device),
                torch.zeros(size, max_seq_len, dtype=torch.int64, device=context.device),
                torch.ones(size, width, width, dtype=torch.bool, device=context.device).tril(),
                torch.arange(size + 1, dtype=torch.int32, device=context.device) * width,
            )

    def prepare_for_capture(self, batch: Batch) -> None:
        batch.attn_metadata = self._static[batch.padded_reqs]

    def prepare_for_replay(self, batch: Batch) -> None:
        static, fresh = self._static[batch.padded_reqs], batch.attn_metadata
        static.prefix.copy_(fresh.prefix)
        static.slots[:, : fresh.slots.shape[1]].copy_(fresh.slots)
        static.ancestors.copy_(fresh.ancestors)


SNIPPET = """
def attend(q, k_pool, v_pool, page_table, cu_seqlens_q, cache_seqlens, max_q, max_k, scale, window, soft_cap, sinks):
    assert window is None and soft_cap is None and sinks is None
    outs, size = [], k_pool.shape[1]
    for r, table in enumerate(page_table.long()):
        n, kv = int(cu_seqlens_q[r + 1] - cu_seqlens_q[r]), int(cache_seqlens[r])
        seen = torch.ones(n, kv, dtype=torch.bool, device=q.device).tril(kv - n)
        k, v = (pool[table].flatten(0, 1)[:kv].repeat_interleave(q.shape[1] // pool.shape[2], 1).transpose(0, 1) for pool in (k_pool, v_pool))
        part = q[int(cu_seqlens_q[r]) : int(cu_seqlens_q[r]) + n].transpose(0, 1)
        outs.append(torch.nn.functional.scaled_dot_product_attention(part, k, v, attn_mask=seen, scale=scale).transpose(0, 1))
    return torch.cat(outs)
"""

register(
    Row(
        name="torch",
        kind=AttentionKind.SOFTMAX,
        create=TorchSoftmax,
        summary="scaled_dot_product_attention over gathered keys",
        snippet=SNIPPET,
        source=__file__,
    )
)
