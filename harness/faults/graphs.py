"""Captured buffers that a replay fills wrongly, late, or not at all; rows and slot lists of a padded size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmatrix.cases.case import Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import Partial, Plan, SoftmaxSubject, edited
from attnmatrix.harness.faults.softmax_where import PIECEWISE, VERIFY, always, beyond_window, has_prefix, plant, put_off

CG, GRAPH = (RunnerMode.CG_DECODE,), (RunnerMode.CG_DECODE, RunnerMode.VERIFY_CG)


class LeavesBehind(SoftmaxSubject):
    """Remembers something of each captured size from replay to replay."""

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        super().init_capture_graph(max_seq_len, batch_sizes)
        self.left: dict[int, Plan] = {}


class CapturedEmpty(SoftmaxSubject):
    """No lengths are copied before capture, and an empty row is divided by zero."""

    def prepare_for_capture(self, batch: Batch) -> None:
        super().prepare_for_capture(batch)
        self.captured[batch.padded_reqs].cache_seqlens.zero_()

    def merge(self, parts: Sequence[Partial]) -> Tensor:
        total = torch.logsumexp(torch.stack([part.lse for part in parts]), dim=0)
        return torch.where(torch.isneginf(total)[..., None], float("nan"), super().merge(parts))


class LastSliceFilled(SoftmaxSubject):
    """All captured sizes hold slices of one length buffer; a replay fills the slice that was captured last."""

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        super().init_capture_graph(max_seq_len, batch_sizes)
        whole = self.captured[max(batch_sizes)].cache_seqlens
        for size, plan in self.captured.items():
            self.captured[size] = edited(plan, cache_seqlens=whole[:size])
        self.last = min(batch_sizes)

    def prepare_for_replay(self, batch: Batch) -> None:
        fresh: Plan = batch.attn_metadata
        slice_ = self.captured[self.last].cache_seqlens
        kept = self.captured[batch.padded_reqs].cache_seqlens.clone()
        kept[: len(slice_)] = fresh.cache_seqlens[: len(slice_)]
        batch.attn_metadata = edited(fresh, cache_seqlens=kept)
        super().prepare_for_replay(batch)


class NewBufferAtReplay(SoftmaxSubject):
    """The lengths of a replay go to a buffer of their own; the graph reads those of the capture."""

    def prepare_for_replay(self, batch: Batch) -> None:
        static: Plan = self.captured[batch.padded_reqs]
        batch.attn_metadata = edited(batch.attn_metadata, cache_seqlens=static.cache_seqlens.clone())
        super().prepare_for_replay(batch)


class FirstTableKept(LeavesBehind):
    """Only the first replay of a captured size copies the page table."""

    def prepare_for_replay(self, batch: Batch) -> None:
        fresh, size = batch.attn_metadata, batch.padded_reqs
        if size in self.left:
            batch.attn_metadata = edited(fresh, page_table=self.left[size].page_table)
        super().prepare_for_replay(batch)
        self.left.setdefault(size, edited(self.captured[size], page_table=self.captured[size].page_table.clone()))


class FirstPositionsKept(LeavesBehind):
    """Only the first replay of a captured size copies the positions."""

    def prepare_for_replay(self, batch: Batch) -> None:
        batch.attn_metadata = edited(batch.attn_metadata, positions=self.left.setdefault(batch.padded_reqs, batch.attn_metadata).positions)
        super().prepare_for_replay(batch)

    def plan(self, batch: Batch) -> Plan:
        plan = super().plan(batch)
        return edited(plan, positions=plan.positions.clone())


class AcceptedStarts(SoftmaxSubject):
    """Query rows lie at a fixed stride, their starts are replayed as sums of accepted lengths."""

    def prepare_for_replay(self, batch: Batch) -> None:
        fresh, width = batch.attn_metadata, self.context.tokens_per_request
        accepted = 1 + torch.arange(batch.padded_reqs, device=fresh.cu_seqlens_q.device) % width
        starts = torch.cat([fresh.cu_seqlens_q[:1], accepted.cumsum(0).int()])
        batch.attn_metadata = edited(fresh, cu_seqlens_q=starts)
        super().prepare_for_replay(batch)


class StaleRows(SoftmaxSubject):
    """Row buffers are reused and read at padded length: rows of an earlier, larger batch follow those of this one."""

    before: Plan | None = None

    def plan(self, batch: Batch) -> Plan:
        fresh, old = super().plan(batch), self.before
        count = len(fresh.cache_seqlens)
        if old is None or len(old.cache_seqlens) <= count:
            self.before = fresh
            return fresh
        width = fresh.page_table.shape[1]
        table = torch.nn.functional.pad(old.page_table[count:, :width], (0, max(0, width - old.page_table.shape[1])))
        return edited(
            fresh,
            cu_seqlens_q=torch.cat([fresh.cu_seqlens_q, old.cu_seqlens_q[count + 1 :]]),
            cache_seqlens=torch.cat([fresh.cache_seqlens, old.cache_seqlens[count:]]),
            page_table=torch.cat([fresh.page_table, table]),
            new_lens=fresh.new_lens + old.new_lens[count:],
        )


class KeysCutToNewTokens(SoftmaxSubject):
    """Keys of all requests packed, prefix and new, then cut to as many as there are new tokens."""

    def key_limit(self, plan: Plan, batch: Batch) -> Tensor:
        lens = plan.cache_seqlens
        start = lens.cumsum(0) - lens
        return (plan.cu_seqlens_q[-1] - start).clamp(min=0).minimum(lens)


class PaddedWrites(SoftmaxSubject):
    """Padded rows of a replay are written to slot 0."""

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        super().init_capture_graph(max_seq_len, batch_sizes)
        width = self.context.tokens_per_request
        self.locations = {size: torch.zeros(size * width, dtype=torch.int64, device=self.context.device) for size in batch_sizes}

    def prepare_for_capture(self, batch: Batch) -> None:
        super().prepare_for_capture(batch)
        self.locations[batch.padded_reqs].copy_(batch.out_loc)

    def prepare_for_replay(self, batch: Batch) -> None:
        super().prepare_for_replay(batch)
        live = batch.size * self.context.tokens_per_request
        self.locations[batch.padded_reqs][:live].copy_(batch.out_loc[:live])
        self.locations[batch.padded_reqs][live:] = 0

    def write(self, k: Tensor, v: Tensor, layer: int, batch: Batch) -> None:
        assert self.context.kv is not None
        self.context.kv.store(layer, self.locations[batch.padded_reqs], k, v)


class PaddingCollectsAndIsRead(PaddedWrites):
    """Table entries past a request's end point to slot 0 as well, and its values count with weight zero."""

    def slots(self, plan: Plan, layer: int, batch: Batch) -> Tensor:
        right = super().slots(plan, layer, batch)
        return torch.where(torch.arange(right.shape[1], device=right.device) < plan.cache_seqlens[:, None], right, 0)

    def partial(self, scores: Tensor, visible: Tensor, values: Tensor) -> Partial:
        return super().partial(scores.masked_fill(~visible[:, None], -1e30), torch.ones_like(visible), values)


def _padded(case: Case, mode: RunnerMode) -> bool:
    return any(step.padded > step.case.batch_size for step in schedule(case, mode).steps)


def _positioned(case: Case) -> bool:
    return case.alibi or beyond_window(case)


def _several_drafts(case: Case) -> bool:
    return case.forward is ForwardMode.TARGET_VERIFY and max(case.new_lens) > 1


plant("B30", "padded rows collected in slot 0, which table padding points to", PaddingCollectsAndIsRead, always, CG, also=_padded)
plant("B37", "zero lengths at capture", CapturedEmpty, always, GRAPH)
plant("B38", "lengths copied into the slice captured last", LastSliceFilled, always, GRAPH)
plant("B39", "the lengths of the capture", NewBufferAtReplay, always, GRAPH)
plant("B40", "query starts at sums of accepted lengths instead of a fixed stride", AcceptedStarts, _several_drafts, VERIFY[1:])
plant("B41", "the page table of the first replay", FirstTableKept, has_prefix, GRAPH)
put_off("B44", "equivalent", "padded rows keep old page ids inside the pool; their output is undefined and never read, they write only to "
        "scratch, and a live row's columns are all rewritten up to its length")  # fmt: skip
plant("B46", "rows of an earlier batch behind those of this one", StaleRows, always, PIECEWISE)
plant("B49", "keys of prefix and new tokens cut to the number of new tokens", KeysCutToNewTokens, has_prefix, PIECEWISE, like=("X08",))
plant("X38", "padded rows written to slot 0", PaddedWrites, always, GRAPH, kind="graph-pad", title="Padded rows write slot 0", also=_padded)
plant("X39", "the positions of the first replay", FirstPositionsKept, _positioned, GRAPH, kind="graph-stale",
      title="Positions not refreshed at replay")  # fmt: skip
