"""Faults of snapshots: which state is put into the second slot, and where."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.lightning_subject import CHUNK, LightningSubject, StatePlan
from attnmatrix.harness.faults.lin_where import DECODES, EXTENDS, decodes, extends, plant

BLOCK = 32  # a kernel's block, at whose ends alone it can snapshot


class FlatGrid(LightningSubject):
    """Boundary states lie on one grid over the packed batch, but are looked up as if each request had a grid of its own."""

    def snapshot(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        start = sum(plan.new_lens[:row])
        if start % CHUNK == 0:
            super().snapshot(row, state, layer, plan, batch)
            return
        boundary = self.boundary
        super().snapshot(row, boundary if boundary is not None else torch.zeros_like(state), layer, plan, batch)

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        self.boundary: Tensor | None = state
        return super().chunk(q, k, v, state, slopes)


class FinalState(LightningSubject):
    """The final state is put into the snapshot's slot."""

    def track(self, row: int, plan: StatePlan) -> int:
        return plan.new_lens[row] if super().track(row, plan) else 0


class BlockBefore(LightningSubject):
    """The state at the last full chunk is labelled as the one after ``track_len`` tokens."""

    def track(self, row: int, plan: StatePlan) -> int:
        exact = super().track(row, plan)
        return exact // CHUNK * CHUNK if exact >= CHUNK else exact


class NoSnapshot(LightningSubject):
    """The snapshot is not taken."""

    def track_slots(self, batch: Batch) -> Tensor | None:
        return None

    def track_lens(self, batch: Batch) -> tuple[int, ...]:
        return (0,) * batch.padded_reqs


class DroppedInMixed(NoSnapshot):
    """A batch with a prefill and a decode loses its snapshots."""

    def track_slots(self, batch: Batch) -> Tensor | None:
        return None if _mixes(batch.prefix_lens, batch.new_lens) else LightningSubject.track_slots(self, batch)

    def track_lens(self, batch: Batch) -> tuple[int, ...]:
        dropped = _mixes(batch.prefix_lens, batch.new_lens)
        return (0,) * batch.padded_reqs if dropped else LightningSubject.track_lens(self, batch)


class AtBlocksOnly(LightningSubject):
    """A snapshot that is neither at a multiple of a block nor at the end is not taken."""

    def track(self, row: int, plan: StatePlan) -> int:
        exact = super().track(row, plan)
        return exact if exact % BLOCK == 0 or exact == plan.new_lens[row] else 0


class OneEarly(LightningSubject):
    def track(self, row: int, plan: StatePlan) -> int:
        return max(0, super().track(row, plan) - 1)


class NeighboursSlot(LightningSubject):
    """Snapshots go to the next request's slot."""

    def track_slots(self, batch: Batch) -> Tensor | None:
        slots = super().track_slots(batch)
        if slots is None:
            return None
        taken = (slots >= 0).nonzero().flatten() if batch.forward_mode is not ForwardMode.DECODE else torch.arange(len(slots))
        rolled = slots.clone()
        rolled[taken] = slots[taken].roll(1)
        return rolled


class SnapshotRounded(LightningSubject):
    def snapshot(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        super().snapshot(row, state.bfloat16().float(), layer, plan, batch)


class LiveSlotToo(LightningSubject):
    """The snapshot stays in the live slot as well: the final state is lost."""

    def store(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        super().store(row, state, layer, plan, batch)
        if self.track(row, plan):
            assert plan.track_slots is not None
            pool = self.pool(layer)
            pool[int(plan.state_indices[row])] = pool[int(plan.track_slots[row])]


class StaleTail(LightningSubject):
    """Replay refreshes the front of a buffer that forward reads from its end."""

    def prepare_for_replay(self, batch: Batch) -> None:
        super().prepare_for_replay(batch)
        slots = self.captured[batch.padded_reqs].track_slots
        assert slots is not None
        slots.copy_(slots.roll(batch.padded_reqs - batch.size))


def _mixes(prefixes: tuple[int, ...], news: tuple[int, ...]) -> bool:
    """A prefill of several tokens beside a decode."""
    decode = any(prefix and new == 1 for prefix, new in zip(prefixes, news, strict=True))
    return decode and any(new > 1 for new in news)


def _tracks(batch: Case) -> list[tuple[int, int, int]]:
    """Snapshot length, new tokens and packed start of each request that has a snapshot."""
    starts = [sum(batch.new_lens[:r]) for r in range(batch.batch_size)]
    return [found for found in zip(batch.track_lens, batch.new_lens, starts, strict=False) if found[0]]


def _tracks_in_extend(batch: Case) -> bool:
    return extends(batch) and bool(_tracks(batch))


def _inside(batch: Case) -> bool:
    return extends(batch) and any(track < new for track, new, _ in _tracks(batch))


def _several(batch: Case) -> bool:
    return extends(batch) and len(_tracks(batch)) > 1


def _padded(case: Case, mode: RunnerMode) -> bool:
    return any(step.padded > step.case.batch_size for step in schedule(case, mode).steps)


KIND = "lin-track"
plant("B130", KIND, "Snapshot index assumes a per-request chunk grid",
      "snapshots of requests that do not start on the batch's chunk grid taken one chunk early", FlatGrid,
      lambda b: extends(b) and any(start % CHUNK for _, _, start in _tracks(b)), EXTENDS, "sgl-project/sglang#33450",
      ("B136", "Y82"))  # fmt: skip
plant("B132", KIND, "Track destinations taken from the stale tail of the static buffer",
      "snapshot slots read from the end of a buffer that was refreshed at its front", StaleTail,
      lambda b: decodes(b) and bool(_tracks(b)), (RunnerMode.CG_DECODE,), "sgl-project/sglang#32555", also=_padded)  # fmt: skip
plant("B133", KIND, "Mixed batch drops the track tensors after the slot was claimed", "no snapshots taken in batches of prefills and decodes",
      DroppedInMixed, lambda b: extends(b) and bool(_tracks(b)) and _mixes(b.prefix_lens, b.new_lens), EXTENDS,
      "sgl-project/sglang#39526", ("Y81",))  # fmt: skip
plant("B135", KIND, "Snapshots for the radix cache are corrupted", "the final state in the snapshot's slot", FinalState, _inside, EXTENDS,
      "sgl-project/sglang#29973")  # fmt: skip
plant("B136", KIND, "Half-filled state block cached as complete", "the state at the chunk before the snapshot's length taken for it",
      BlockBefore, lambda b: extends(b) and any(track % CHUNK and track > CHUNK for track, _, _ in _tracks(b)), EXTENDS,
      "vllm-project/vllm#34587", ("B130", "Y82"))  # fmt: skip
plant("Y81", KIND, "No snapshot", "no snapshot taken", NoSnapshot, lambda b: bool(_tracks(b)), (*EXTENDS, *DECODES[1:]),
      like=("B133", "Y83"))  # fmt: skip
plant("Y82", KIND, "Snapshot one token early", "snapshots taken one token early", OneEarly,
      lambda b: extends(b) and any(track > 1 for track, _, _ in _tracks(b)), EXTENDS, like=("B130", "B136"))  # fmt: skip
plant("Y83", KIND, "Snapshots at the ends of blocks only", "no snapshot where its length is no multiple of 32 and not the last token",
      AtBlocksOnly, lambda b: extends(b) and any(track % BLOCK and track < new for track, new, _ in _tracks(b)), EXTENDS,
      like=("Y81",))  # fmt: skip
plant("Y84", KIND, "Snapshots in the neighbour's slot", "snapshots in the next request's slot", NeighboursSlot, _several, EXTENDS)
plant("Y85", "precision", "Snapshot rounded to bf16", "snapshots rounded to bf16", SnapshotRounded,
      lambda b: _tracks_in_extend(b) and b.state_dtype is None, EXTENDS)  # fmt: skip
plant("Y86", KIND, "Snapshot overwrites the live state", "the snapshot left in the live slot too", LiveSlotToo, _inside, EXTENDS)
