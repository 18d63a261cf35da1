"""Rows ``torch`` and ``torch-vk`` for Lightning attention: the chunked form, batched recurrent decode, closed-form verify. They differ in the
pool's layout of states, ``[K, V]`` and ``[V, K]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from attnmatrix.cases.case import AttentionKind, ForwardMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.lazy import torch
from attnmatrix.harness.registry import Row, register

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch

CHUNK = 32


@dataclass
class LightningMetadata:
    cu_seqlens_q: Tensor  # on gpu
    state_indices: Tensor  # on gpu; int32 [R], -1 = padding
    parents_seen: Tensor | None = None  # on gpu; bool [R, d, d], verify only
    spans: tuple[tuple[int, int, int, bool], ...] = ()  # on cpu; state slot, start, stop, has a prefix
    tracks: dict[int, tuple[int, int]] = field(default_factory=dict)  # on cpu; by state slot: tokens until the snapshot, its slot
    track_slots: Tensor | None = None  # on gpu; int32 [R], decode only; -1: no snapshot

    def get_last_indices(self, bs: int) -> Tensor:
        return self.cu_seqlens_q[1 : bs + 1] - 1


class TorchLightning(AttentionBackend):
    """Float32 arithmetic over the state pool; the output is rounded once."""

    def prepare_metadata(self, batch: Batch) -> None:
        assert batch.state_indices is not None
        meta = LightningMetadata(batch.cu_seqlens_q, batch.state_indices)
        if batch.forward_mode is ForwardMode.TARGET_VERIFY and batch.drafts is not None:
            meta.parents_seen = self._per_request(batch)
        if batch.track_lens is not None and batch.track_state_indices is not None:
            meta.track_slots = torch.where(batch.track_lens > 0, batch.track_state_indices, -1)
        if batch.forward_mode is not ForwardMode.DECODE:
            if meta.track_slots is not None and batch.track_lens is not None:
                rows = zip(batch.state_indices.tolist(), batch.track_lens.tolist(), meta.track_slots.tolist(), strict=True)
                meta.tracks = {slot: (track, into) for slot, track, into in rows if into >= 0}
            start = 0
            for slot, prefix, new in zip(batch.state_indices.tolist(), batch.prefix_lens, batch.new_lens, strict=True):
                meta.spans += ((slot, start, start + new, prefix > 0),) if new and slot >= 0 else ()
                start += new
        batch.attn_metadata = meta

    @staticmethod
    def _per_request(batch: Batch) -> Tensor:
        """Ancestors ``[T, widest]`` regrouped as ``[R, widest, widest]``, rows past a request's drafts False."""
        assert batch.drafts is not None
        seen = batch.drafts.ancestors
        widest = seen.shape[1]
        grouped = seen.new_zeros(batch.padded_reqs, widest, widest)
        start = 0
        for row, new in enumerate(batch.new_lens):
            grouped[row, :new] = seen[start : start + new]
            start += new
        return grouped

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        context, meta = self.context, batch.attn_metadata
        assert context.states is not None and context.slopes is not None
        slopes = context.slopes[layer_id]
        if batch.forward_mode is ForwardMode.DECODE:
            return self._decode(q, k, v, layer_id, slopes, meta)
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            return self._verify(q, k, v, layer_id, slopes, batch, meta)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        pool = context.states.as_kv(context.states.state(layer_id))
        for slot, start, stop, has_prefix in meta.spans:
            state = pool[slot].float() if has_prefix else torch.zeros_like(pool[0], dtype=torch.float32)
            track, into = meta.tracks.get(slot, (0, -1))
            edges = sorted({*range(start, stop, CHUNK), start + track, stop})  # a chunk ends where the snapshot is taken
            for begin, end in pairwise(edges):
                chunk = slice(begin, end)
                out[chunk], state = self._chunk(q[chunk].float(), k[chunk].float(), v[chunk].float(), state, slopes)
                if end == start + track:
                    pool[into] = state.to(pool.dtype)
            pool[slot] = state.to(pool.dtype)
        return out

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        """One chunk ``[n, H, D]`` from ``state`` ``[H, K, V]``: pairwise part plus the decayed initial state."""
        count = q.shape[0]
        steps = torch.arange(count, device=q.device)
        gap = (steps[:, None] - steps[None, :]).float()
        decay = torch.exp(-slopes[:, None, None] * gap.clamp(min=0)) * (gap >= 0)
        score = torch.einsum("ihd,jhd->hij", q, k) * decay
        out = torch.einsum("hij,jhe->ihe", score, v)
        head = torch.exp(-slopes[None, :] * (steps[:, None] + 1))
        out = out + torch.einsum("ihd,hde->ihe", q * head[..., None], state)
        tail = torch.exp(-slopes[None, :] * (count - 1 - steps[:, None]))
        state = state * torch.exp(-slopes * count)[:, None, None] + torch.einsum("ihd,ihe->hde", k * tail[..., None], v)
        return out * self.context.scale, state

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, layer: int, slopes: Tensor, meta: LightningMetadata) -> Tensor:
        assert self.context.states is not None
        pool = self.context.states.as_kv(self.context.states.state(layer))
        before = pool[meta.state_indices.clamp(min=0).long()].float()
        decay = torch.exp(-slopes)[None, :, None, None]
        after = before * decay + k.float()[..., :, None] * v.float()[..., None, :]
        for slots in (meta.state_indices, meta.track_slots):
            if slots is not None:
                hit = slots[:, None] == torch.arange(pool.shape[0], device=q.device)[None, :]
                chosen = after[hit.int().argmax(dim=0)].to(pool.dtype)
                pool.copy_(torch.where(hit.any(dim=0)[:, None, None, None], chosen, pool))
        return (torch.einsum("rhd,rhde->rhe", q.float(), after) * self.context.scale).to(q.dtype)

    def _verify(self, q: Tensor, k: Tensor, v: Tensor, layer: int, slopes: Tensor, batch: Batch, meta: LightningMetadata) -> Tensor:
        """Closed form: token i is the decayed initial state plus the decayed contributions of its ancestors."""
        states = self.context.states
        assert states is not None and meta.parents_seen is not None
        rows, widest = meta.parents_seen.shape[:2]
        q4, k4, v4 = (self._by_request(t, batch, rows, widest).float() for t in (q, k, v))
        seen = meta.parents_seen
        depth = seen.sum(dim=-1) - 1
        gap = (depth[:, :, None] - depth[:, None, :]).float()
        weight = torch.exp(-slopes[None, :, None, None] * gap.clamp(min=0)[:, None]) * seen[:, None]  # [R, H, d, d]
        initial = states.as_kv(states.state(layer))[meta.state_indices.clamp(min=0).long()].float()
        faded = torch.exp(-slopes[None, None, :] * (depth[..., None] + 1).float())  # [R, d, H]
        after = initial[:, None] * faded[..., None, None] + torch.einsum("rhij,rjhd,rjhe->rihde", weight, k4, v4)
        out = torch.einsum("rihd,rihde->rihe", q4, after) * self.context.scale
        drafted = states.as_kv(states.intermediate(layer))
        if len(set(batch.new_lens)) == 1:
            live = (meta.state_indices >= 0)[:, None, None, None, None]
            drafted[:rows, :widest] = torch.where(live, after.to(drafted.dtype), drafted[:rows, :widest])
            return out.flatten(0, 1).to(q.dtype)
        packed = []
        for row, new in enumerate(batch.new_lens):
            drafted[row, :new] = after[row, :new].to(drafted.dtype)
            packed.append(out[row, :new])
        return torch.cat(packed).to(q.dtype)

    @staticmethod
    def _by_request(tensor: Tensor, batch: Batch, rows: int, widest: int) -> Tensor:
        """``[T, H, D]`` as ``[R, widest, H, D]``, missing tokens zero."""
        if len(set(batch.new_lens)) == 1:
            return tensor.unflatten(0, (rows, widest))
        padded = tensor.new_zeros(rows, widest, *tensor.shape[1:])
        start = 0
        for row, new in enumerate(batch.new_lens):
            padded[row, :new] = tensor[start : start + new]
            start += new
        return padded

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        device, width = self.context.device, self.context.tokens_per_request
        self._static: dict[int, LightningMetadata] = {}
        for size in batch_sizes:
            seen = torch.ones(size, width, width, dtype=torch.bool, device=device).tril()
            indices = torch.full((size,), -1, dtype=torch.int32, device=device)
            starts = torch.arange(size + 1, dtype=torch.int32, device=device) * width
            self._static[size] = LightningMetadata(starts, indices, seen, track_slots=indices.clone())

    def prepare_for_capture(self, batch: Batch) -> None:
        batch.attn_metadata = self._static[batch.padded_reqs]

    def prepare_for_replay(self, batch: Batch) -> None:
        static, fresh = self._static[batch.padded_reqs], batch.attn_metadata
        static.state_indices.copy_(fresh.state_indices)
        assert static.track_slots is not None
        static.track_slots.copy_(fresh.track_slots if fresh.track_slots is not None else torch.full_like(static.track_slots, -1))
        if static.parents_seen is not None and fresh.parents_seen is not None:
            static.parents_seen.copy_(fresh.parents_seen)


SNIPPET = """
def attend(q, k, v, states, slots, starts, prefix, new, slopes, scale):
    out, decay = torch.empty_like(q), torch.exp(-slopes)[:, None, None]
    for r, slot in enumerate(slots.tolist()):
        state = states[slot] if prefix[r] else torch.zeros_like(states[slot])
        for t in range(int(starts[r]), int(starts[r + 1])):
            state = state * decay + k[t].float()[:, :, None] * v[t].float()[:, None, :]
            out[t] = (torch.einsum("hd,hde->he", q[t].float(), state) * scale).to(q.dtype)
        states[slot] = state
    return out
"""

for name, layout in (("torch", "KV"), ("torch-vk", "VK")):
    register(
        Row(
            name=name,
            kind=AttentionKind.LIGHTNING,
            create=TorchLightning,
            conventions=Conventions(state_layout=layout),
            summary=f"chunked linear attention with per-head decay, states [{layout[0]}, {layout[1]}]",
            snippet=SNIPPET if layout == "KV" else "",
            few_on_cpu=layout == "VK",
            source=__file__,
        )
    )
