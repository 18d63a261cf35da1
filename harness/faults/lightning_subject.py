"""The working Lightning row that faults are planted in: chunked extend, recurrent decode and verify, every stage a method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from attnmatrix.cases.case import ForwardMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.batch import Batch

CHUNK = 8


@dataclass
class StatePlan:
    """Prepared metadata. In graph modes these are the captured buffers."""

    cu_seqlens_q: Tensor  # on gpu; int32 [R + 1]
    state_indices: Tensor  # on gpu; int32 [R]
    parents: Tensor | None  # on gpu; int64 [R, n], -1 for a child of the live state (verify only)
    prefix_lens: tuple[int, ...]  # on cpu
    new_lens: tuple[int, ...]  # on cpu
    track_lens: tuple[int, ...] = ()  # on cpu; extends only
    track_slots: Tensor | None = None  # on gpu; int32 [R], -1: no snapshot

    def get_last_indices(self, bs: int) -> Tensor:
        return self.cu_seqlens_q[1 : bs + 1] - 1


class LightningSubject(AttentionBackend):
    """Float32 recurrences over the state pool. Shapes: T tokens, H heads, K and V the two state axes, R padded requests."""

    def prepare_metadata(self, batch: Batch) -> None:
        batch.attn_metadata = self.plan(batch)

    def plan(self, batch: Batch) -> StatePlan:
        assert batch.state_indices is not None
        verify = batch.forward_mode is ForwardMode.TARGET_VERIFY
        return StatePlan(
            self.query_starts(batch),
            self.state_slots(batch),
            self.parents(batch) if verify else None,
            batch.prefix_lens,
            batch.new_lens,
            self.track_lens(batch),
            self.track_slots(batch),
        )

    def query_starts(self, batch: Batch) -> Tensor:
        return batch.cu_seqlens_q

    def state_slots(self, batch: Batch) -> Tensor:
        assert batch.state_indices is not None
        return batch.state_indices

    def track_lens(self, batch: Batch) -> tuple[int, ...]:
        """New tokens of each request after which an extend snapshots its state, 0: not at all."""
        extends = batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.MIXED) and batch.track_lens is not None
        return tuple(batch.track_lens.tolist()) if extends and batch.track_lens is not None else (0,) * batch.padded_reqs

    def track_slots(self, batch: Batch) -> Tensor | None:
        if batch.track_lens is None or batch.track_state_indices is None:
            return None
        return torch.where(batch.track_lens > 0, batch.track_state_indices, -1)

    def parents(self, batch: Batch) -> Tensor:
        """int64 ``[R, n]``; rows shorter than n are filled with -1."""
        assert batch.drafts is not None
        widest = max(batch.new_lens)
        rows = [[*tree, *([-1] * (widest - len(tree)))] for tree in batch.drafts.trees]
        return torch.tensor(rows, dtype=torch.int64, device=self.context.device)

    def slopes(self, layer: int) -> Tensor:
        """float32 ``[H]``."""
        assert self.context.slopes is not None
        return self.context.slopes[layer]

    def pool(self, layer: int) -> Tensor:
        """``[slots, H, K, V]``."""
        assert self.context.states is not None
        return self.context.states.as_kv(self.context.states.state(layer))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        plan: StatePlan = batch.attn_metadata
        q32, k32, v32 = q.float(), k.float(), v.float()
        if batch.forward_mode is ForwardMode.DECODE:
            out = self.decode(q32, k32, v32, layer_id, plan, batch)
        elif batch.forward_mode is ForwardMode.TARGET_VERIFY:
            out = self.verify(q32, k32, v32, layer_id, plan, batch)
        else:
            out = self.extend(q32, k32, v32, layer_id, plan, batch)
        return (out * self.context.scale).to(q.dtype)

    def initial_state(self, row: int, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        """``[H, K, V]`` that an extend starts from: the slot's state, or zero for a request without prefix."""
        stored = self.pool(layer)[plan.state_indices[row]].float()
        return stored if plan.prefix_lens[row] else torch.zeros_like(stored)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        out, start = torch.full_like(q, float("nan")), 0
        for row, new in enumerate(plan.new_lens):
            if new:
                state = self.initial_state(row, layer, plan, batch)
                edges = sorted({*range(start, start + new, CHUNK), start + self.track(row, plan), start + new})
                for begin, end in pairwise(edges):
                    cut = slice(begin, end)
                    out[cut], state = self.chunk(q[cut], k[cut], v[cut], state, self.slopes(layer))
                    if end == start + self.track(row, plan):
                        self.snapshot(row, state, layer, plan, batch)
                self.store(row, state, layer, plan, batch)
            start += new
        return out

    def track(self, row: int, plan: StatePlan) -> int:
        """Tokens of a request after which its state is snapshot, 0: not at all."""
        return plan.track_lens[row] if plan.track_lens else 0

    def snapshot(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        """Write a request's state ``[H, K, V]`` after ``track`` tokens to its other slot."""
        assert plan.track_slots is not None
        self.pool(layer)[int(plan.track_slots[row])] = state

    def store(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        """Write a request's final state ``[H, K, V]``; slot -1 touches nothing."""
        slot = int(plan.state_indices[row])
        if slot >= 0:
            self.pool(layer)[slot] = state

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``[n, H, V]`` of one chunk and the state after it."""
        count = q.shape[0]
        index = torch.arange(count, device=q.device)
        gap = (index[:, None] - index[None, :]).float()
        within = torch.exp(-slopes[:, None, None] * gap.clamp(min=0)) * (gap >= 0)
        pairs = torch.einsum("ihd,jhd->hij", q, k) * within
        head = torch.exp(-slopes[None, :] * (index[:, None] + 1))
        out = torch.einsum("hij,jhe->ihe", pairs, v) + torch.einsum("ihd,hde->ihe", q * head[..., None], state)
        tail = torch.exp(-slopes[None, :] * (count - 1 - index[:, None]))
        kept = state * torch.exp(-slopes * count)[:, None, None]
        return out, kept + torch.einsum("ihd,ihe->hde", k * tail[..., None], v)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        after = self.step(self.gather(layer, plan), k, v, layer)
        self.scatter(after, layer, plan)
        if plan.track_slots is not None:
            self.scatter_to(plan.track_slots, after, layer)
        return torch.einsum("rhd,rhde->rhe", q, after)

    def gather(self, layer: int, plan: StatePlan) -> Tensor:
        """``[R, H, K, V]``; padded rows read slot 0 and count for nothing."""
        return self.pool(layer)[plan.state_indices.clamp(min=0).long()].float()

    def step(self, before: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """One token for each request: ``[R, H, K, V]``."""
        return before * torch.exp(-self.slopes(layer))[None, :, None, None] + k[..., :, None] * v[..., None, :]

    def scatter(self, after: Tensor, layer: int, plan: StatePlan) -> None:
        """Write the live rows' states; slot -1 touches nothing."""
        self.scatter_to(plan.state_indices, after, layer)

    def scatter_to(self, slots: Tensor, after: Tensor, layer: int) -> None:
        """Rewrite the pool through a select, since slot -1 is no index."""
        pool = self.pool(layer)
        hit = slots[:, None] == torch.arange(pool.shape[0], device=pool.device)[None, :]
        chosen = after[hit.int().argmax(dim=0)]
        pool.copy_(torch.where(hit.any(dim=0)[:, None, None, None], chosen, pool))

    def verify(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        """One draft token after the other, each from its parent's state; the live state stays."""
        assert self.context.states is not None
        assert plan.parents is not None
        drafted = self.context.states.as_kv(self.context.states.intermediate(layer))
        rows, widest = plan.parents.shape
        starts = plan.cu_seqlens_q[:-1].long()
        live = self.gather(layer, plan)
        states, outs = [live], []
        for node in range(widest):
            at = (starts + node).clamp(max=q.shape[0] - 1)
            before = torch.stack(states, dim=1)[torch.arange(rows, device=q.device), self.source(plan, node) + 1]
            after = self.step(before, k[at], v[at], layer)
            states.append(after)
            outs.append(torch.einsum("rhd,rhde->rhe", q[at], after))
        return self.keep(torch.stack(states[1:], dim=1), torch.stack(outs, dim=1), drafted, plan, batch)

    def source(self, plan: StatePlan, node: int) -> Tensor:
        """int64 ``[R]``: the draft token whose state this one continues, -1 for the live state."""
        assert plan.parents is not None
        return plan.parents[:, node]

    def keep(self, states: Tensor, outs: Tensor, drafted: Tensor, plan: StatePlan, batch: Batch) -> Tensor:
        """Write the live rows of ``states`` ``[R, n, H, K, V]`` into ``drafted``; pack ``outs`` ``[R, n, H, V]`` as ``[T, H, V]``."""
        if len(set(plan.new_lens)) == 1:
            own = drafted[: states.shape[0], : states.shape[1]]
            own.copy_(torch.where((plan.state_indices >= 0)[:, None, None, None, None], states, own))
            return outs.flatten(0, 1)
        for row, new in enumerate(plan.new_lens):
            drafted[row, :new] = states[row, :new]
        return torch.cat([outs[row, :new] for row, new in enumerate(plan.new_lens)])

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        device, width = self.context.device, self.context.tokens_per_request
        chain = torch.arange(-1, width - 1, device=device)
        self.captured = {
            size: StatePlan(
                torch.arange(size + 1, dtype=torch.int32, device=device) * width,
                torch.full((size,), -1, dtype=torch.int32, device=device),
                chain.repeat(size, 1) if self.context.forward_mode is ForwardMode.TARGET_VERIFY else None,
                (1,) * size,
                (width,) * size,
                track_slots=torch.full((size,), -1, dtype=torch.int32, device=device),
            )
            for size in batch_sizes
        }

    def prepare_for_capture(self, batch: Batch) -> None:
        batch.attn_metadata = self.captured[batch.padded_reqs]

    def prepare_for_replay(self, batch: Batch) -> None:
        static, fresh = self.captured[batch.padded_reqs], batch.attn_metadata
        static.cu_seqlens_q.copy_(fresh.cu_seqlens_q)
        static.state_indices.copy_(fresh.state_indices)
        if static.track_slots is not None:
            static.track_slots.copy_(fresh.track_slots if fresh.track_slots is not None else torch.full_like(static.track_slots, -1))
        if static.parents is not None and fresh.parents is not None:
            static.parents.copy_(fresh.parents)
