"""A Case made concrete: pools, tables, inputs, poison. The one place where a case becomes tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.placement import PoolPlan, plan_pool
from attnmatrix.cases.schedule import RECYCLED, Schedule, schedule
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.context import Context
from attnmatrix.harness.draft_tree import draft_tree
from attnmatrix.harness.draws import NUM_LAYERS, Draws, LayerInputs, StepData
from attnmatrix.harness.dtypes import TORCH_DTYPES
from attnmatrix.harness.history import Histories
from attnmatrix.harness.pools import KVPool, StatePool
from attnmatrix.harness.probes import Poison, Probe, fill_keys, fill_states, fill_values
from attnmatrix.harness.token_table import SPARE_ROWS, keep_ends, spread, token_rows, token_table
from attnmatrix.references.slopes import alibi_slopes, lightning_slopes

UNTOUCHED = 54321.0
"""What state slots hold that nobody may read, in batches that snapshot states; representable in every dtype but fp16 and bf16, which hold
the value next to it."""


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
        self.schedule: Schedule = plan or schedule(case, mode, probe.recycled)
        numbered = self.schedule.requests
        owners = self.schedule.owners
        self.pool_plan: PoolPlan = plan_pool(owners)
        self.dtype = TORCH_DTYPES[case.dtype]
        seed = case.data_seed ^ probe.salt
        self.generator = torch.Generator().manual_seed(seed)
        self.num_requests = max((requests.stop for requests in numbered), default=0)
        taken_over = sum(step.case.batch_size for step in self.schedule.steps if step.follows == "recycled_rows")  # the last ones
        self.req_rows = spread(self.num_requests - taken_over, seed)
        each = [r for requests, batch in zip(numbered, self.schedule.batches, strict=True) for r in _tracked(requests, batch)]
        tracked = list(dict.fromkeys(each))  # a request that takes a place over has its number too
        slots = spread(self.num_requests + len(tracked), seed ^ 0x57A7E)  # another order: a row is no slot
        self.state_slots, self.track_slots = slots[: self.num_requests], dict(zip(tracked, slots[self.num_requests :], strict=True))
        for requests, step in zip(numbered, self.schedule.steps, strict=True):
            if step.follows == "resume":
                self.state_slots[requests.start : requests.stop] = [self.track_slots[first] for first in numbered[0]]
        self.histories = Histories()
        lens = [n for batch in owners for n in batch.kv_lens]
        self._token_rows = token_rows(self.pool_plan, lens, probe.poison, seed).to(device)  # by request, while the row is the request's
        for before, requests, step in zip(numbered, numbered[1:], self.schedule.steps[1:], strict=False):
            if step.follows == "recycled_rows":
                keep_ends(self._token_rows, before, requests, step.case)
        self.req_to_token = token_table(self._token_rows, self.req_rows)
        for before, step in zip(numbered, self.schedule.steps[1:], strict=False):
            if step.follows == "recycled_rows":
                self.req_rows += self.req_rows[before.start : before.stop]
        self.entered = -1
        self.context = self._context()
        self._poison()
        self.steps = Draws(probe, self.generator, self.dtype, device).steps(self.schedule)
        self._fill_live()
        self._plant_nan()

    @property
    def scratch_slots(self) -> Tensor:
        """int64: the slots of the scratch page, empty when the pool has none."""
        page, size = self.pool_plan.scratch_page, self.pool_plan.page_size
        return torch.arange(0 if page is None else page * size, 0 if page is None else (page + 1) * size, device=self.device)

    def _context(self) -> Context:
        case, linear = self.case, self.case.kind is not AttentionKind.SOFTMAX
        heads, layout = case.heads, self.conventions
        batches = self.schedule.batches
        padded = [] if self.mode.pads_tokens else [step.padded for step in self.schedule.steps]
        max_reqs = max([1, *padded, *(batch.batch_size for batch in batches)])
        widest = max([1, *(n for batch in batches for n in batch.new_lens)])
        kv = states = slopes = None
        scales: list[tuple[float, float]] = []
        if linear:
            drafts = widest if any(batch.forward.seq_lens_is_prefix for batch in batches) else 1
            states = StatePool(
                self.num_requests + len(self.track_slots) + SPARE_ROWS,
                heads.q,
                heads.dim,
                NUM_LAYERS,
                TORCH_DTYPES[case.state_dtype or "fp32"],
                self.device,
                layout.state_layout,
                max_reqs,
                drafts,
            )
            rank, ranks = case.shard
            own = slice(rank * heads.q, (rank + 1) * heads.q)
            per_layer = [lightning_slopes(heads.q * ranks, layer, NUM_LAYERS)[own] for layer in range(NUM_LAYERS)]
            slopes = torch.stack(per_layer).float().to(self.device)
        else:
            kv_dtype = TORCH_DTYPES[case.kv_dtype] if case.kv_dtype else self.dtype
            scales = [case.kv_scales(layer) for layer in range(NUM_LAYERS) if case.kv_dtype]
            pages, shape = self.pool_plan.num_pages, (case.page_size, heads.kv, heads.dim, NUM_LAYERS)
            kv = KVPool(pages, *shape, kv_dtype, self.device, layout.kv_layout, scales)
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
            k_scales=tuple(k_scale for k_scale, _ in scales),
            v_scales=tuple(v_scale for _, v_scale in scales),
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
                if self.track_slots:
                    others = [slot for slot in range(states.num_slots) if slot not in self.state_slots]
                    states.state(layer)[[*others, *self.track_slots.values()]] = UNTOUCHED

    def _fill_live(self) -> None:
        """What the requests of every batch have cached, but for those whose places still belong to others."""
        for index, step in enumerate(self.steps):
            if not step.follows:
                self._store(index, self.context.kv, self.context.states)

    def _store(self, index: int, kv: KVPool | None, states: StatePool | None) -> None:
        step = self.steps[index]
        for request, prefix, length in zip(step.requests, step.prefixes, step.case.prefix_lens, strict=True):
            for layer in range(NUM_LAYERS) if length else ():
                if kv is not None:
                    freed = freed_tokens(step.case, length, layer)
                    keys, values = (drawn[layer][freed:].to(self.device) for drawn in (prefix.keys, prefix.values))
                    kv.store(layer, self.slots(request, freed, length), keys, values)
                if states is not None:
                    states.as_kv(states.state(layer))[self.state_slots[request]] = prefix.states[layer].to(self.device)

    def enter(self, index: int) -> None:
        """Give step ``index`` its places: to be called when the steps before it are done, before its batch is prepared. Only requests that
        take over others' rows or pages need it; once is enough."""
        if index > self.entered:
            self.entered = index
            self.hand_over(index, self.req_to_token, self.context.kv, self.context.states)

    def hand_over(self, index: int, req_to_token: Tensor, kv: KVPool | None, states: StatePool | None) -> None:
        """Put into tables and pools what changes hands at step ``index``."""
        step = self.steps[index]
        if step.follows == "recycled_rows":
            numbers = list(step.requests)
            req_to_token[[self.req_rows[number] for number in numbers]] = self._token_rows[numbers]
        if step.follows in RECYCLED:
            self._store(index, kv, states)

    def _plant_nan(self) -> None:
        kv, states, poison = self.context.kv, self.context.states, self.probe.poison
        if not poison.value.startswith("nan"):
            return
        size = self.pool_plan.page_size
        slots = [page * size + offset for page in self.pool_plan.spare_pages for offset in range(size)]
        if poison is Poison.NAN_TAIL:
            lens = [n for batch in self.schedule.owners for n in batch.kv_lens]
            tables = zip(self.pool_plan.tables, lens, strict=True)
            slots = [pages[-1] * size + offset for pages, n in tables if n % size for offset in range(n % size, size)]
        for layer in range(NUM_LAYERS):
            if poison is Poison.NAN_WINDOW:
                slots = self._freed_slots(layer)
            page, offset = torch.tensor(slots, dtype=torch.int64) // size, torch.tensor(slots, dtype=torch.int64) % size
            if kv is not None:
                kv.by_page(kv.k(layer))[page, offset] = float("nan")
                kv.by_page(kv.v(layer))[page, offset] = float("nan")
            if states is not None and poison is Poison.NAN_UNREFERENCED:
                unowned = [slot for slot in range(states.num_slots) if slot not in self.state_slots]
                states.state(layer)[unowned] = float("nan")

    def _freed_slots(self, layer: int) -> list[int]:
        """Slots of the pages that each request's window has left behind."""
        lens = [
            (step.case, request, length)
            for step in self.steps
            for request, length in zip(step.requests, step.case.prefix_lens, strict=True)
        ]
        return [slot for case, request, length in lens for slot in self.slots(request, 0, freed_tokens(case, length, layer)).tolist()]

    def keep_only(self, request: int) -> None:
        """Leave the first step with a single request of its batch (index within it); data, slots and tables stay."""
        step = self.steps[0]
        case, start = step.case, sum(step.case.new_lens[:request])
        rows = slice(start, start + case.new_lens[request])
        alone = case.but(
            prefix_lens=(case.prefix_lens[request],),
            new_lens=(case.new_lens[request],),
            trees=(case.tree(request),) if case.trees else (),
            track_lens=case.track_lens[request : request + 1],
        )
        inputs = tuple(LayerInputs(planned.q[rows], planned.k[rows], planned.v[rows]) for planned in step.inputs)
        number = step.requests[request]
        kept = StepData(alone, range(number, number + 1), step.hidden[rows], inputs, (step.prefixes[request],))
        self.steps = (kept, *self.steps[1:])

    def slots(self, request: int, start: int, stop: int) -> Tensor:
        """int64 ``[stop - start]``: physical slots of a request's positions."""
        return self._token_rows[request, start:stop].long()

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
        tracks = [self.track_slots.get(request, -1) for request in step.requests]
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
            track_lens=torch.tensor(case.track_lens, dtype=torch.int32, device=device) if case.track_lens else None,
            track_state_indices=torch.tensor(tracks, dtype=torch.int32, device=device) if case.track_lens else None,
        )


def _tracked(requests: range, batch: Case) -> list[int]:
    """The requests of a batch whose state is snapshot."""
    return [request for request, track in zip(requests, batch.track_lens, strict=False) if track]


def freed_tokens(case: Case, prefix: int, layer: int) -> int:
    """Cached tokens of a request in whole pages that no new token's window reaches: an engine has freed those pages."""
    window = case.layer_window(layer)
    return 0 if window is None else max(0, prefix - window + 1) // case.page_size * case.page_size
