"""A Case made concrete: pools, tables, inputs, poison. The one place where a case becomes tensors."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.placement import PoolPlan, plan_pool, shared_prefix_len
from attnmatrix.cases.schedule import Schedule, schedule
from attnmatrix.harness.batch import Batch, DraftTree
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.context import Context
from attnmatrix.harness.dtypes import TORCH_DTYPES
from attnmatrix.harness.pools import KVPool, StatePool
from attnmatrix.harness.probes import Poison, Probe, fill_keys, fill_states, fill_values, needle_queries, orthogonal_keys, peaked
from attnmatrix.references.slopes import alibi_slopes, lightning_slopes

NUM_LAYERS = 2
HIDDEN = 64  # width of the two-layer model's residual stream


@dataclass(frozen=True)
class LayerInputs:
    """Planned inputs of one layer for all new tokens of a step: ``q`` ``[T, Hq, D]``, ``k``, ``v`` ``[T, Hkv, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Prefix:
    """What one request has cached before a step: keys and values per layer ``[P, Hkv, D]``, or states per layer ``[H, K, V]``."""

    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()
    states: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class StepData:
    """One batch of the schedule with its data. ``requests`` numbers its requests over the whole world."""

    case: Case
    requests: range
    hidden: Tensor
    inputs: tuple[LayerInputs, ...]
    prefixes: tuple[Prefix, ...]


class World:
    """Pools filled, tables laid out and inputs drawn for every batch of a case's schedule.

    ``plan`` replaces the schedule that belongs to the case and the mode. Raises ValueError for a case that the mode cannot drive.
    """

    def __init__(
        self, case: Case, mode: RunnerMode, probe: Probe, conventions: Conventions, device: torch.device, plan: Schedule | None = None
    ) -> None:
        if case.forward not in mode.forward_modes:
            raise ValueError(f"runner mode {mode.value} does not drive {case.forward.value} batches")
        self.case, self.mode, self.probe, self.conventions, self.device = case, mode, probe, conventions, device
        self.schedule: Schedule = plan or schedule(case, mode)
        self.pool_plan: PoolPlan = plan_pool(self.schedule.batches)
        self.dtype = TORCH_DTYPES[case.dtype]
        self.generator = torch.Generator().manual_seed(case.data_seed)
        self.num_requests = sum(batch.batch_size for batch in self.schedule.batches)
        self.req_rows = self._spread(self.num_requests)
        self.state_slots = self._spread(self.num_requests)
        self.req_to_token = self._table()
        self.context = self._context()
        self._poison()
        self.steps = self._steps()
        self._fill_live()
        self._plant_nan()

    def _spread(self, count: int) -> list[int]:
        """``count`` of ``count + 3`` indices in random order, the first and the last among them."""
        rng = random.Random(self.case.data_seed ^ 0x5EED)
        if count < 2:
            return [count + 2] * count
        chosen = [0, count + 2, *rng.sample(range(1, count + 2), count - 2)]
        rng.shuffle(chosen)
        return chosen

    @property
    def scratch_slots(self) -> Tensor:
        """int64: the slots of the scratch page, empty when the pool has none."""
        page, size = self.pool_plan.scratch_page, self.pool_plan.page_size
        return torch.arange(0 if page is None else page * size, 0 if page is None else (page + 1) * size, device=self.device)

    def _table(self) -> Tensor:
        """int32 ``[rows, max_len]``; entries past a request's length are valid slots that it mostly does not own."""
        plan, size = self.pool_plan, self.pool_plan.page_size
        lens = [n for batch in self.schedule.batches for n in batch.kv_lens]
        width = -(-max([1, *lens]) // size) * size + size
        rng = random.Random(self.case.data_seed ^ 0x7AB1E)
        table = torch.empty(self.num_requests + 3, width, dtype=torch.int32)
        columns = torch.arange(width) % size
        targets = self._padding_targets()
        for row in range(table.shape[0]):
            pages = torch.tensor([rng.choice(targets) for _ in range(width // size)])
            table[row] = (pages.repeat_interleave(size) * size + columns).int()
        for request, pages_of in enumerate(plan.tables):
            if pages_of:
                slots = torch.tensor(pages_of).repeat_interleave(size) * size + columns[: len(pages_of) * size]
                table[self.req_rows[request], : len(slots)] = slots.int()
        return table.to(self.device)

    def _padding_targets(self) -> list[int]:
        """Pages that table entries past a request's last page point to: any page, but for the NaN tiers, which tell them apart."""
        everything = list(range(max(1, self.pool_plan.num_pages)))
        if self.probe.poison in (Poison.NAN_PADDING, Poison.NAN_TAIL):
            return self.spare_pages or everything
        if self.probe.poison is Poison.NAN_UNREFERENCED:
            return [page for page in everything if page not in self.spare_pages] or everything
        return everything

    @property
    def spare_pages(self) -> list[int]:
        """Pages of no request, the scratch page apart."""
        owned = {page for table in self.pool_plan.tables for page in table} | {self.pool_plan.scratch_page}
        return [page for page in range(self.pool_plan.num_pages) if page not in owned]

    def _context(self) -> Context:
        case, linear = self.case, self.case.kind is not AttentionKind.SOFTMAX
        heads, layout = case.heads, self.conventions
        batches = self.schedule.batches
        padded = [] if self.mode.pads_tokens else [step.padded for step in self.schedule.steps]
        max_reqs = max([1, *padded, *(batch.batch_size for batch in batches)])
        widest = max([1, *(n for batch in batches for n in batch.new_lens)])
        kv = states = slopes = None
        if linear:
            drafts = widest if case.forward.seq_lens_is_prefix else 1
            states = StatePool(
                self.num_requests + 3, heads.q, heads.dim, NUM_LAYERS, torch.float32, self.device, layout.state_layout, max_reqs, drafts
            )
            per_layer = [lightning_slopes(heads.q, layer, NUM_LAYERS) for layer in range(NUM_LAYERS)]
            slopes = torch.stack(per_layer).float().to(self.device)
        else:
            kv_dtype = TORCH_DTYPES[case.kv_dtype] if case.kv_dtype else self.dtype
            kv = KVPool(self.pool_plan.num_pages, case.page_size, heads.kv, heads.dim, NUM_LAYERS, kv_dtype, self.device, layout.kv_layout)
        less = 1 if layout.window == "exclusive" else 0
        windows = [case.layer_window(layer) for layer in range(NUM_LAYERS)]
        return Context(
            kind=case.kind,
            device=self.device,
            dtype=self.dtype,
            heads=heads,
            scale=heads.dim**-0.5,
            num_layers=NUM_LAYERS,
            page_size=case.page_size,
            req_to_token=self.req_to_token,
            forward_mode=case.forward,
            tokens_per_request=widest,
            max_reqs=max_reqs,
            max_seq_len=self.req_to_token.shape[1],
            kv=kv,
            states=states,
            windows=tuple(None if window is None else window - less for window in windows),
            soft_cap=case.soft_cap,
            sinks=torch.randn(heads.q, generator=self.generator).to(self.device) if case.sinks else None,
            alibi_slopes=alibi_slopes(heads.q).float().to(self.device) if case.alibi else None,
            slopes=slopes,
        )

    def _poison(self) -> None:
        kv, states, poison = self.context.kv, self.context.states, self.probe.poison
        generator = torch.Generator().manual_seed(self.case.data_seed ^ 0xBAD)
        for layer in range(NUM_LAYERS):
            if kv is not None:
                fill_keys(poison, kv.k(layer), generator)
                fill_values(poison, kv.v(layer), generator)
            if states is not None:
                fill_states(poison, states.state(layer), generator)
                fill_states(poison, states.intermediate(layer), generator)

    def _steps(self) -> tuple[StepData, ...]:
        steps, start = [], 0
        for batch in self.schedule.batches:
            requests = range(start, start + batch.batch_size)
            start = requests.stop
            prefixes = self._prefixes(batch)
            inputs = tuple(self._layer_inputs(batch, prefixes, layer) for layer in range(NUM_LAYERS))
            hidden = torch.randn(batch.num_tokens, HIDDEN, generator=self.generator).to(self.dtype).to(self.device)
            steps.append(StepData(batch, requests, hidden, inputs, prefixes))
        return tuple(steps)

    def _draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (peaked(shape, self.generator) * scale).to(self.dtype).to(self.device)

    def _layer_inputs(self, batch: Case, prefixes: tuple[Prefix, ...], layer: int) -> LayerInputs:
        heads, tokens = batch.heads, batch.num_tokens
        q = self._draw(tokens, heads.q, heads.dim, scale=batch.gain)
        k, v = self._draw(tokens, heads.kv, heads.dim), self._draw(tokens, heads.kv, heads.dim)
        if self.probe.inputs != "needle":
            return LayerInputs(q, k, v)
        if batch.kind is not AttentionKind.SOFTMAX:
            queries, keys = orthogonal_keys(batch, self.generator)
            return LayerInputs(queries.to(self.dtype).to(self.device), keys.to(self.dtype).to(self.device), v)
        starts = [sum(batch.new_lens[:r]) for r in range(batch.batch_size)]
        aligned = [
            needle_queries(batch, r, torch.cat([prefixes[r].keys[layer], k[start : start + batch.new_lens[r]]]))
            for r, start in enumerate(starts)
        ]
        return LayerInputs(torch.cat([q[:0].float(), *aligned]).to(self.dtype), k, v)

    def _prefixes(self, batch: Case) -> tuple[Prefix, ...]:
        heads = batch.heads
        prefixes: list[Prefix] = []
        if batch.kind is not AttentionKind.SOFTMAX:
            for length in batch.prefix_lens:
                scale = batch.state_scale if length else 0.0
                shape = (heads.q, heads.dim, heads.dim)
                drawn = [torch.randn(shape, generator=self.generator) * scale for _ in range(NUM_LAYERS)]
                prefixes.append(Prefix(states=tuple(state.to(self.device) for state in drawn)))
            return tuple(prefixes)
        common = shared_prefix_len(batch)
        donor: Prefix | None = None
        for length in batch.prefix_lens:
            keys = tuple(self._draw(length, heads.kv, heads.dim) for _ in range(NUM_LAYERS))
            values = tuple(self._draw(length, heads.kv, heads.dim) for _ in range(NUM_LAYERS))
            if common and length >= batch.page_size:
                if donor is None:
                    donor = Prefix(keys, values)
                for layer in range(NUM_LAYERS):
                    keys[layer][:common] = donor.keys[layer][:common]
                    values[layer][:common] = donor.values[layer][:common]
            prefixes.append(Prefix(keys, values))
        return tuple(prefixes)

    def _fill_live(self) -> None:
        kv, states = self.context.kv, self.context.states
        for step in self.steps:
            for request, prefix, length in zip(step.requests, step.prefixes, step.case.prefix_lens, strict=True):
                if not length:
                    continue
                slots = self.slots(request, 0, length)
                for layer in range(NUM_LAYERS):
                    if kv is not None:
                        kv.store(layer, slots, prefix.keys[layer], prefix.values[layer])
                    if states is not None:
                        states.as_kv(states.state(layer))[self.state_slots[request]] = prefix.states[layer]

    def _plant_nan(self) -> None:
        kv, states, poison = self.context.kv, self.context.states, self.probe.poison
        if not poison.value.startswith("nan"):
            return
        size = self.pool_plan.page_size
        slots = [page * size + offset for page in self.spare_pages for offset in range(size)]
        if poison is Poison.NAN_TAIL:
            lens = [n for batch in self.schedule.batches for n in batch.kv_lens]
            tables = zip(self.pool_plan.tables, lens, strict=True)
            slots = [pages[-1] * size + offset for pages, n in tables if n % size for offset in range(n % size, size)]
        page, offset = torch.tensor(slots, dtype=torch.int64) // size, torch.tensor(slots, dtype=torch.int64) % size
        for layer in range(NUM_LAYERS):
            if kv is not None:
                kv.by_page(kv.k(layer))[page, offset] = float("nan")
                kv.by_page(kv.v(layer))[page, offset] = float("nan")
            if states is not None and poison is Poison.NAN_UNREFERENCED:
                unowned = [slot for slot in range(states.num_slots) if slot not in self.state_slots]
                states.state(layer)[unowned] = float("nan")

    def keep_only(self, request: int) -> None:
        """Leave the first step with a single request of its batch (index within it); data, slots and tables stay."""
        step = self.steps[0]
        case, start = step.case, sum(step.case.new_lens[:request])
        rows = slice(start, start + case.new_lens[request])
        alone = case.but(
            prefix_lens=(case.prefix_lens[request],),
            new_lens=(case.new_lens[request],),
            trees=(case.tree(request),) if case.trees else (),
        )
        inputs = tuple(LayerInputs(planned.q[rows], planned.k[rows], planned.v[rows]) for planned in step.inputs)
        number = step.requests[request]
        kept = StepData(alone, range(number, number + 1), step.hidden[rows], inputs, (step.prefixes[request],))
        self.steps = (kept, *self.steps[1:])

    def slots(self, request: int, start: int, stop: int) -> Tensor:
        """int64 ``[stop - start]``: physical slots of a request's positions."""
        return self.req_to_token[self.req_rows[request], start:stop].long()

    def batch(self, index: int) -> Batch:
        """The unpadded batch of one step."""
        step = self.steps[index]
        case, device = step.case, self.device
        lens = case.prefix_lens if case.forward.seq_lens_is_prefix else case.kv_lens
        rows = [self.req_rows[request] for request in step.requests]
        stored = [
            self.slots(request, prefix, prefix + new)
            for request, prefix, new in zip(step.requests, case.prefix_lens, case.new_lens, strict=True)
        ]
        depths = [torch.tensor(case.depths(r)) + case.prefix_lens[r] for r in range(case.batch_size)]
        starts = torch.tensor([0, *case.new_lens]).cumsum(0)
        linear = case.kind is not AttentionKind.SOFTMAX
        slots = [self.state_slots[request] for request in step.requests]
        return Batch(
            forward_mode=case.forward,
            size=case.batch_size,
            padded_reqs=case.batch_size,
            prefix_lens=case.prefix_lens,
            new_lens=case.new_lens,
            kv_lens=case.kv_lens,
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            req_pool_indices=torch.tensor(rows, dtype=torch.int64, device=device),
            out_loc=torch.cat([torch.empty(0, dtype=torch.int64, device=device), *stored]),
            positions=torch.cat([torch.empty(0, dtype=torch.int64), *(d.long() for d in depths)]).to(device),
            cu_seqlens_q=starts.int().to(device),
            state_indices=torch.tensor(slots, dtype=torch.int32, device=device) if linear else None,
            drafts=draft_tree(case, device) if case.forward.seq_lens_is_prefix else None,
        )


def draft_tree(case: Case, device: torch.device) -> DraftTree:
    """The draft tokens of a verify batch, ancestors walked parent by parent."""
    widest = max([1, *case.new_lens])
    rows: list[list[bool]] = []
    for request in range(case.batch_size):
        tree = case.tree(request)
        for node in range(len(tree)):
            seen, at = [False] * widest, node
            while at >= 0:
                seen[at] = True
                at = tree[at]
            rows.append(seen)
    trees = tuple(case.tree(request) for request in range(case.batch_size))
    ancestors = torch.tensor(rows, dtype=torch.bool, device=device).view(len(rows), widest)
    return DraftTree(trees, ancestors, case.draft_kind)
