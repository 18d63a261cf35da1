"""Negative controls: a real row given wrong inputs must be rejected by the comparison that passes it.

A control tampers at the contract's boundary (context, batch, or q, k, v of a call), stays in bounds, and applies by a rule on the case alone.
The expectation does not move. Calls are tampered with inside graph captures too, so batches are changed by operations on the device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.story import parse_story
from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.context import Context
from attnmatrix.harness.registry import Row

if TYPE_CHECKING:
    from attnmatrix.harness.world import World

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Control:
    """One way to be given wrong inputs. ``kind`` groups them; a passing cell needs one of each kind that its cases allow."""

    id: str
    kind: str
    title: str
    applies: Callable[[Case], bool]
    context: Callable[[World, Context], Context] = lambda world, context: context
    batch: Callable[[Batch, Context], Batch] = lambda batch, context: batch
    inputs: Callable[[Tensor, Tensor, Tensor], Inputs] = lambda q, k, v: (q, k, v)
    accepted: Callable[[Tensor], Tensor] = lambda accepted: accepted


class TamperedBackend(AttentionBackend):
    """A row's backend behind a control; the runner does not notice."""

    def __init__(self, row: Row, world: World, control: Control) -> None:
        super().__init__(world.context)
        self.control = control
        self.inner = row.create(control.context(world, world.context))

    def prepare_metadata(self, batch: Batch) -> None:
        given = self.control.batch(batch, self.context)
        self.inner.prepare_metadata(given)
        batch.attn_metadata = given.attn_metadata

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return self.inner.forward(*self.control.inputs(q, k, v), layer_id, self._prepared(batch))

    def forward_with_lse(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.inner.forward_with_lse(*self.control.inputs(q, k, v), layer_id, self._prepared(batch))

    @property
    def returns_lse(self) -> bool:
        return self.inner.returns_lse

    def _prepared(self, batch: Batch) -> Batch:
        """The batch tampered with, and what was prepared for it."""
        return replace(self.control.batch(batch, self.context), attn_metadata=batch.attn_metadata)

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        self.inner.init_capture_graph(max_seq_len, batch_sizes)

    def prepare_for_capture(self, batch: Batch) -> None:
        self.inner.prepare_for_capture(batch)

    def prepare_for_replay(self, batch: Batch) -> None:
        given = self._prepared(batch)
        self.inner.prepare_for_replay(given)
        batch.attn_metadata = given.attn_metadata

    def commit(self, accepted: Tensor, batch: Batch) -> None:
        self.inner.commit(self.control.accepted(accepted), self._prepared(batch))

    def inspect_metadata(self, batch: Batch) -> PreparedMetadata | None:
        return self.inner.inspect_metadata(batch)


def _foreign_page(world: World, context: Context) -> Context:
    """The first page that every request's new tokens see, in the narrowest window, replaced by the next physical page that is not its own."""
    plan, size = world.pool_plan, context.page_size
    windows = [window for window in map(world.case.layer_window, range(context.num_layers)) if window is not None]
    back = max(1, min(windows) - 1) if windows else None  # cached tokens in view of the first new one
    prefixes = {r: n for step in reversed(world.steps) for r, n in zip(step.requests, step.case.prefix_lens, strict=True)}
    table = context.req_to_token.clone()
    for request, pages in enumerate(plan.tables):
        others = [page for page in range(plan.num_pages) if page not in pages]
        if pages and others:
            column = max(0, prefixes[request] - back) // size if back is not None else 0
            page = min(others, key=lambda other: (other - pages[column]) % plan.num_pages)
            table[world.req_rows[request], column * size : (column + 1) * size] = torch.arange(
                page * size, (page + 1) * size, dtype=table.dtype
            )
    return replace(context, req_to_token=table)


def _announced(batch: Batch, prefix_lens: tuple[int, ...], cached: Tensor) -> Batch:
    """The batch with other prefix lengths: ``prefix_lens`` on the host, ``cached`` int32 ``[R]`` on the device."""
    return replace(
        batch,
        prefix_lens=prefix_lens,
        kv_lens=tuple(p + n for p, n in zip(prefix_lens, batch.new_lens, strict=True)),
        seq_lens=cached if batch.forward_mode.seq_lens_is_prefix else cached + batch.cu_seqlens_q.diff(),
    )


def _cached(batch: Batch) -> Tensor:
    """int32 ``[R]`` on the device: the batch's prefix lengths."""
    return batch.seq_lens if batch.forward_mode.seq_lens_is_prefix else batch.seq_lens - batch.cu_seqlens_q.diff()


def _longer(by: int) -> Callable[[Batch, Context], Batch]:
    """Every cached prefix one token longer or shorter than it is; a request without prefix stays as it is."""

    def tamper(batch: Batch, context: Context) -> Batch:
        cached = _cached(batch)
        return _announced(batch, tuple(n + by if n else 0 for n in batch.prefix_lens), cached + by * (cached > 0).int())

    return tamper


def _neighbour(batch: Batch, context: Context) -> Batch:
    """Every request looks itself up under its neighbour's row (and state slot)."""
    states = batch.state_indices
    return replace(
        batch,
        req_pool_indices=batch.req_pool_indices.roll(1),
        state_indices=states.roll(1) if states is not None else None,
    )


def _stale_state(batch: Batch, context: Context) -> Batch:
    """Requests without a prefix are announced with one, so their slot's old state counts."""
    return _announced(batch, tuple(n or 1 for n in batch.prefix_lens), _cached(batch).clamp(min=1))


def _lost_state(batch: Batch, context: Context) -> Batch:
    """Requests with a prefix are announced without one, so their state is dropped."""
    return _announced(batch, (0,) * len(batch.prefix_lens), _cached(batch) * 0)


def _moved_boundary(batch: Batch, context: Context) -> Batch:
    """One token of the first request is counted to the second."""
    first = next((r for r, new in enumerate(batch.new_lens[:-1]) if new >= 2), None)
    if first is None:
        return batch
    new = list(batch.new_lens)
    new[first], new[first + 1] = new[first] - 1, new[first + 1] + 1
    starts = batch.cu_seqlens_q - (torch.arange(len(new) + 1, device=batch.cu_seqlens_q.device) == first + 1).int()
    return replace(
        batch,
        new_lens=tuple(new),
        kv_lens=tuple(p + n for p, n in zip(batch.prefix_lens, new, strict=True)),
        seq_lens=batch.seq_lens + (0 if batch.forward_mode.seq_lens_is_prefix else starts.diff() - batch.cu_seqlens_q.diff()),
        cu_seqlens_q=starts,
    )


def _other_snapshot(batch: Batch, context: Context) -> Batch:
    """Every snapshot taken one token earlier, or later where it is the first token's."""
    if batch.track_lens is None:
        return batch
    moved = torch.where(batch.track_lens > 1, batch.track_lens - 1, 2 * batch.track_lens)
    return replace(batch, track_lens=moved)


def _accepts(case: Case) -> bool:
    """A story whose commits one draft token less would change."""
    return any(turn.action == "accept" and any(turn.counts) for turn in parse_story(case.story))


def _chain(batch: Batch, context: Context) -> Batch:
    """The draft tree announced as a chain."""
    if batch.drafts is None:
        return batch
    seen = batch.drafts.ancestors
    rows = [torch.ones(new, seen.shape[1], dtype=torch.bool, device=seen.device).tril() for new in batch.new_lens]
    trees = tuple(tuple(range(-1, new - 1)) for new in batch.new_lens)
    return replace(batch, drafts=replace(batch.drafts, trees=trees, ancestors=torch.cat(rows)))


def _other_layer(world: World, context: Context) -> Context:
    """The pools of the layers in reverse order."""
    return replace(
        context,
        kv=context.kv.reversed_layers() if context.kv is not None else None,
        states=context.states.reversed_layers() if context.states is not None else None,
    )


def _linear(case: Case) -> bool:
    return case.kind is not AttentionKind.SOFTMAX


def _softmax(case: Case) -> bool:
    return case.kind is AttentionKind.SOFTMAX


def _has_prefix(case: Case) -> bool:
    return any(p and n for p, n in zip(case.prefix_lens, case.new_lens, strict=True))


def _crosses_window(case: Case) -> bool:
    return case.window is not None and max(case.kv_lens, default=0) > case.window and case.num_tokens > 0


def _has_tokens(case: Case) -> bool:
    return case.num_tokens > 0


CONTROLS: tuple[Control, ...] = (
    Control(
        "wrong-page", "table", "another page in place of the first that each request sees", lambda c: _softmax(c) and _has_prefix(c),
        context=_foreign_page,
    ),
    Control("one-short", "length", "every prefix one token shorter", lambda c: _softmax(c) and _has_prefix(c), batch=_longer(-1)),
    Control("one-long", "length", "every prefix one token longer", lambda c: _softmax(c) and _has_prefix(c), batch=_longer(1)),
    Control(
        "lost-write", "write", "new keys and values rounded to zero before they are written", _has_tokens,
        inputs=lambda q, k, v: (q, k * 0, v * 0),
    ),
    Control(
        "swapped-heads", "heads", "query heads rolled by one group (by one head where there is one group)", lambda c: _has_tokens(c) and c.heads.q > 1,
        inputs=lambda q, k, v: (q.roll(q.shape[1] // k.shape[1] if k.shape[1] > 1 else 1, dims=1), k, v),
    ),
    Control(
        "wrong-scale", "scale", "softmax scale 10 % too large", lambda c: _has_tokens(c) and max(c.kv_lens) > 1,
        context=lambda world, context: replace(context, scale=context.scale * 1.1),
    ),
    Control(
        "wrong-key-scale", "kv-scale", "the scales of the cached keys doubled", lambda c: c.kv_dtype is not None and _has_tokens(c) and max(c.kv_lens) > 1,
        context=lambda world, context: replace(context, k_scales=tuple(2 * scale for scale in context.k_scales)),
    ),
    Control(
        "neighbour", "request", "each request under its neighbour's row", lambda c: c.batch_size > 1 and _has_prefix(c), batch=_neighbour
    ),
    Control(
        "moved-boundary", "request", "one token counted to the next request",
        lambda c: c.forward in (ForwardMode.EXTEND, ForwardMode.MIXED) and any(n >= 2 for n in c.new_lens[:-1]),
        batch=_moved_boundary,
    ),
    Control("other-layer", "layer", "the layers' pools exchanged", _has_prefix, context=_other_layer),
    Control(
        "window-off-by-one", "window", "a window one key larger", lambda c: _softmax(c) and _crosses_window(c),
        context=lambda world, context: replace(context, windows=tuple(w + 1 if w is not None else None for w in context.windows)),
    ),
    Control(
        "no-soft-cap", "score", "the soft cap left out", lambda c: c.soft_cap is not None and _has_tokens(c),
        context=lambda world, context: replace(context, soft_cap=None),
    ),
    Control(
        "no-sinks", "score", "the sinks left out", lambda c: c.sinks and _has_tokens(c),
        context=lambda world, context: replace(context, sinks=None),
    ),
    Control(
        "no-alibi", "score", "the ALiBi bias left out", lambda c: c.alibi and _has_prefix(c),
        context=lambda world, context: replace(context, alibi_slopes=None),
    ),
    Control(
        "tree-as-chain", "mask", "the draft tree announced as a chain",
        lambda c: any(c.tree(r) != tuple(range(-1, n - 1)) for r, n in enumerate(c.new_lens)), batch=_chain,
    ),
    Control(
        "stale-state", "state", "a request without prefix started from its slot's old state",
        lambda c: _linear(c) and c.forward in (ForwardMode.EXTEND, ForwardMode.MIXED) and any(n and not p for p, n in zip(c.prefix_lens, c.new_lens, strict=True)),
        batch=_stale_state,
    ),
    Control(
        "lost-state", "state", "the cached state dropped",
        lambda c: _linear(c) and c.forward in (ForwardMode.EXTEND, ForwardMode.MIXED) and _has_prefix(c), batch=_lost_state,
    ),
    Control(
        "wrong-decay", "decay", "decay rates of the heads reversed", lambda c: _linear(c) and _has_prefix(c) and c.heads.q > 1,
        context=lambda world, context: replace(context, slopes=context.slopes.flip(1) if context.slopes is not None else None),
    ),
    Control(
        "other-snapshot", "snapshot", "snapshots taken one token earlier or later", lambda c: any(c.track_lens) and c.forward is not ForwardMode.DECODE,
        batch=_other_snapshot,
    ),
    Control(
        "one-less-accepted", "commit", "one draft token less committed", _accepts, accepted=lambda accepted: (accepted - 1).clamp(min=0)
    ),
)  # fmt: skip
"""All controls."""


def control_kinds(case: Case) -> frozenset[str]:
    """The kinds of controls that apply to a case."""
    return frozenset(control.kind for control in CONTROLS if control.applies(case))
