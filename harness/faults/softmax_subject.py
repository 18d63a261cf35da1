"""The working softmax row that faults are planted in: every stage of a paged kernel is a method to override."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnmatrix.cases.case import ForwardMode
from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.batch import Batch

SPLIT = 8  # keys per split of the split-KV path


@dataclass
class Plan:
    """Prepared metadata. In graph modes these are the captured buffers."""

    cu_seqlens_q: Tensor  # on gpu; int32 [R + 1]
    cache_seqlens: Tensor  # on gpu; int32 [R], prefix + new
    page_table: Tensor  # on gpu; int64 [R, pages]
    positions: Tensor  # on gpu; int64 [T]
    ancestors: Tensor | None  # on gpu; bool [T, widest]
    new_lens: tuple[int, ...]  # on cpu

    def get_last_indices(self, bs: int) -> Tensor:
        return self.cu_seqlens_q[1 : bs + 1] - 1


@dataclass(frozen=True)
class Partial:
    """One split: ``out`` ``[R, n, Hq, D]`` normalised over the split, ``lse`` ``[R, n, Hq]`` in nats (-inf: no key)."""

    out: Tensor
    lse: Tensor


class SoftmaxSubject(AttentionBackend):
    """Float32 attention over the pool, split over keys and merged by LSE. Override one stage to plant a fault.

    Shapes: R padded requests, n the longest new length, L the keys of the widest page table, T tokens.
    """

    def prepare_metadata(self, batch: Batch) -> None:
        batch.attn_metadata = self.plan(batch)

    def plan(self, batch: Batch) -> Plan:
        return Plan(
            cu_seqlens_q=self.query_starts(batch),
            cache_seqlens=self.key_lens(batch),
            page_table=self.page_table(batch),
            positions=self.query_positions(batch),
            ancestors=batch.drafts.ancestors if batch.drafts is not None else None,
            new_lens=batch.new_lens,
        )

    def query_starts(self, batch: Batch) -> Tensor:
        """int32 ``[R + 1]``."""
        return batch.cu_seqlens_q

    def key_lens(self, batch: Batch) -> Tensor:
        """int32 ``[R]``: keys each request may read, new ones included."""
        return batch.seq_lens + batch.cu_seqlens_q.diff() if batch.forward_mode.seq_lens_is_prefix else batch.seq_lens

    def page_table(self, batch: Batch) -> Tensor:
        """int64 ``[R, pages]``: physical pages."""
        size = self.context.page_size
        return self.context.req_to_token[batch.req_pool_indices, : max(batch.kv_lens, default=1) : size].long() // size

    def query_positions(self, batch: Batch) -> Tensor:
        """int64 ``[T]``."""
        return batch.positions

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        plan: Plan = batch.attn_metadata
        self.write(k, v, layer_id, batch)
        slots = self.slots(plan, layer_id, batch)
        keys, values = self.read(slots, layer_id, batch)
        if not len(q):
            return torch.empty_like(q)
        rows, present = self.rows(plan, batch)
        queries = self.queries(q, rows, plan, batch)
        visible = self.visible(plan, rows, layer_id, batch) & present[..., None]
        scores = self.scores(queries, keys, plan, rows, layer_id, batch)
        out = self.attend(scores, visible, values, layer_id, batch)
        return self.scatter(out.to(q.dtype), rows, present, q)

    def write(self, k: Tensor, v: Tensor, layer: int, batch: Batch) -> None:
        """Store the new keys and values."""
        assert self.context.kv is not None
        self.context.kv.store(layer, batch.out_loc, k, v)

    def slots(self, plan: Plan, layer: int, batch: Batch) -> Tensor:
        """int64 ``[R, L]``: the slot of each key position."""
        size = self.context.page_size
        columns = torch.arange(plan.page_table.shape[1] * size, device=plan.page_table.device)
        return plan.page_table[:, columns // size] * size + columns % size

    def read(self, slots: Tensor, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Keys and values ``[R, L, Hkv, D]``, of a quantised pool multiplied by its scales, in float32."""
        kv, size = self.context.kv, self.context.page_size
        assert kv is not None
        page, offset = slots // size, slots % size
        keys, values = kv.by_page(kv.k(layer))[page, offset], kv.by_page(kv.v(layer))[page, offset]
        if not kv.quantised:
            return keys, values
        k_scale, v_scale = self.kv_scales(layer, batch)
        return keys.float() * k_scale, values.float() * v_scale

    def kv_scales(self, layer: int, batch: Batch) -> tuple[float, float]:
        """What a quantised pool's keys and values are multiplied by."""
        return self.context.k_scale(layer), self.context.v_scale(layer)

    def rows(self, plan: Plan, batch: Batch) -> tuple[Tensor, Tensor]:
        """int64 ``[R, n]``: row of q of each request's i-th token, and bool ``[R, n]``: whether it has that many."""
        widest = max(1, max(plan.new_lens, default=1))
        index = torch.arange(widest, device=plan.cu_seqlens_q.device)[None, :]
        starts = plan.cu_seqlens_q.long()
        present = index < starts.diff()[:, None]
        return (starts[:-1, None] + index).clamp(max=max(0, batch.num_tokens - 1)), present

    def queries(self, q: Tensor, rows: Tensor, plan: Plan, batch: Batch) -> Tensor:
        """``[R, n, Hq, D]``: the query of each request's i-th token."""
        return q[rows]

    def key_positions(self, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        """int64 ``[R, L]``: position of each key; of a draft token prefix + depth."""
        length = plan.page_table.shape[1] * self.context.page_size
        index = torch.arange(length, device=rows.device)[None, :]
        draft = index - self.prefix(plan)[:, None]
        drafted = plan.positions[rows].gather(1, draft.clamp(0, rows.shape[1] - 1))
        return torch.where(draft >= 0, drafted, index)

    def prefix(self, plan: Plan) -> Tensor:
        """int64 ``[R]``: cached tokens."""
        return plan.cache_seqlens.long() - plan.cu_seqlens_q.long().diff()

    def visible(self, plan: Plan, rows: Tensor, layer: int, batch: Batch) -> Tensor:
        """bool ``[R, n, L]``: which keys each token sees."""
        length = plan.page_table.shape[1] * self.context.page_size
        index = torch.arange(length, device=rows.device)
        seen = self.ordered(index[None, :] - self.prefix(plan)[:, None], plan, rows, batch)
        seen = seen & (index[None, :] < self.key_limit(plan, batch)[:, None])[:, None, :]
        window = self.window(layer, batch)
        if window is not None:
            seen = seen & (plan.positions[rows][..., None] - self.key_positions(plan, rows, batch)[:, None, :] < window)
        return seen

    def ordered(self, draft: Tensor, plan: Plan, rows: Tensor, batch: Batch) -> Tensor:
        """bool ``[R, n, L]``: the keys at or before each token, or its ancestors; ``draft`` int64 ``[R, L]`` numbers the new keys from 0."""
        token = torch.arange(rows.shape[1], device=rows.device)
        if plan.ancestors is None:
            return draft[:, None, :] <= token[None, :, None]
        widest = plan.ancestors.shape[1]
        within = plan.ancestors[rows].gather(2, draft.clamp(0, widest - 1)[:, None, :].expand(-1, rows.shape[1], -1))
        return (draft < 0)[:, None, :] | (within & (draft < widest)[:, None, :])

    def key_limit(self, plan: Plan, batch: Batch) -> Tensor:
        """int ``[R]``: keys of each request that are loaded at all."""
        return plan.cache_seqlens

    def window(self, layer: int, batch: Batch) -> int | None:
        """Keys a token sees, its own included."""
        return self.context.windows[layer]

    def scores(self, queries: Tensor, keys: Tensor, plan: Plan, rows: Tensor, layer: int, batch: Batch) -> Tensor:
        """float32 ``[R, Hq, n, L]``: scaled, capped, biased, not yet masked."""
        context = self.context
        score = self.dots(queries.float(), self.expand(keys.float())) * self.scale(layer)
        if context.soft_cap is not None:
            score = context.soft_cap * torch.tanh(score / context.soft_cap)
        if context.alibi_slopes is not None:
            distance = self.key_positions(plan, rows, batch)[:, None, :] - plan.positions[rows][..., None]
            score = score + self.alibi(layer)[None, :, None, None] * distance[:, None]
        return score

    def dots(self, queries: Tensor, keys: Tensor) -> Tensor:
        """float32 ``[R, Hq, n, L]`` of queries ``[R, n, Hq, D]`` and keys ``[R, L, Hq, D]``."""
        return torch.einsum("rnhd,rlhd->rhnl", queries, keys)

    def expand(self, tensor: Tensor) -> Tensor:
        """``[R, L, Hkv, D]`` repeated to the query heads."""
        return tensor.repeat_interleave(self.context.heads.group, dim=2)

    def scale(self, layer: int) -> float:
        return self.context.scale

    def alibi(self, layer: int) -> Tensor:
        assert self.context.alibi_slopes is not None
        return self.context.alibi_slopes

    def sink(self) -> Tensor | None:
        """float32 ``[Hq]``."""
        return self.context.sinks

    def attend(self, scores: Tensor, visible: Tensor, values: Tensor, layer: int, batch: Batch) -> Tensor:
        """float32 ``[R, n, Hq, D]``: masked softmax, split over keys, merged."""
        wide = self.expand(values.float())
        parts = []
        for start in range(0, scores.shape[-1], SPLIT):
            cut = slice(start, start + SPLIT)
            parts.append(self.partial(scores[..., cut], visible[..., cut], wide[:, cut]))
        return self.merge(parts)

    def partial(self, scores: Tensor, visible: Tensor, values: Tensor) -> Partial:
        """One split; dead values are zeroed so that NaN in them stays out."""
        masked = scores.masked_fill(~visible[:, None], float("-inf"))
        lse = torch.logsumexp(masked, dim=-1)
        weight = torch.exp(masked - torch.where(torch.isfinite(lse), lse, 0.0)[..., None])
        values = values.masked_fill(~visible.any(dim=1)[..., None, None], 0.0)
        return Partial(torch.einsum("rhnl,rlhd->rnhd", weight, values), lse.transpose(1, 2))

    def merge(self, parts: Sequence[Partial]) -> Tensor:
        """The splits weighted by their share of the denominator; a sink takes its share and adds nothing."""
        lses = torch.stack([part.lse for part in parts])
        sink = self.sink()
        if sink is not None:
            lses = torch.cat([lses, sink.expand(lses.shape[1:])[None]])
        total = torch.logsumexp(lses, dim=0)
        weight = torch.exp(lses - torch.where(torch.isfinite(total), total, 0.0))
        return sum((w[..., None] * part.out for w, part in zip(weight, parts, strict=False)), torch.zeros_like(parts[0].out))

    def scatter(self, out: Tensor, rows: Tensor, present: Tensor, q: Tensor) -> Tensor:
        """``[R, n, Hq, D]`` back to ``[T, Hq, D]``; captured graphs have no host-side shapes, so every row is written by index."""
        result = q.new_zeros(q.shape[0] + 1, *q.shape[1:])
        target = torch.where(present, rows, q.shape[0])
        return result.index_put((target.flatten(),), out.flatten(0, 1))[: q.shape[0]]

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        device, width = self.context.device, self.context.tokens_per_request
        pages = self.context.pages_per_request
        self.captured: dict[int, Plan] = {}
        for size in batch_sizes:
            ones = torch.ones(width, width, dtype=torch.bool, device=device).tril().repeat(size, 1)
            self.captured[size] = Plan(
                torch.arange(size + 1, dtype=torch.int32, device=device) * width,
                torch.full((size,), width, dtype=torch.int32, device=device),
                torch.zeros(size, pages, dtype=torch.int64, device=device),
                torch.zeros(size * width, dtype=torch.int64, device=device),
                ones if self.context.forward_mode is ForwardMode.TARGET_VERIFY else None,
                (width,) * size,
            )

    def prepare_for_capture(self, batch: Batch) -> None:
        batch.attn_metadata = self.captured[batch.padded_reqs]

    def prepare_for_replay(self, batch: Batch) -> None:
        static, fresh = self.captured[batch.padded_reqs], batch.attn_metadata
        static.cu_seqlens_q.copy_(fresh.cu_seqlens_q)
        static.cache_seqlens.copy_(fresh.cache_seqlens)
        static.page_table[:, : fresh.page_table.shape[1]].copy_(fresh.page_table)
        static.positions.copy_(fresh.positions)
        if static.ancestors is not None and fresh.ancestors is not None:
            static.ancestors.copy_(fresh.ancestors)
        batch.attn_metadata = static

    def inspect_metadata(self, batch: Batch) -> PreparedMetadata:
        plan: Plan = batch.attn_metadata
        return PreparedMetadata(
            cu_seqlens_q=plan.cu_seqlens_q,
            cache_seqlens=plan.cache_seqlens,
            page_table=plan.page_table,
            last_indices=plan.get_last_indices(batch.size),
            positions=plan.positions,
        )


def edited(plan: Plan, **changes: object) -> Plan:
    """A plan with some fields replaced."""
    return replace(plan, **changes)  # type: ignore[arg-type]
