"""Faults of what is written back: the final state of an extend or a decode step, and its precision."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.lightning_subject import CHUNK, LightningSubject, StatePlan
from attnmatrix.harness.faults.lin_where import DECODES, EXTENDS, VERIFIES, decodes, extends, has_prefix, plant, rows, verifies

WRITES = (*EXTENDS, DECODES[1])


class EndsEarly(LightningSubject):
    """The state written is that after ``kept`` of a request's new tokens; outputs are right."""

    def kept(self, new: int) -> int:
        raise NotImplementedError

    def extend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        early, start = [], 0
        for row, new in enumerate(plan.new_lens):
            state, stop = self.initial_state(row, layer, plan, batch).clone(), start + self.kept(new)
            for begin in range(start, stop, CHUNK):
                cut = slice(begin, min(begin + CHUNK, stop))
                _, state = self.chunk(q[cut], k[cut], v[cut], state, self.slopes(layer))
            early.append(state)
            start += new
        out = super().extend(q, k, v, layer, plan, batch)
        for row, new in enumerate(plan.new_lens):
            if new:
                self.store(row, early[row], layer, plan, batch)
        return out


class FullChunksOnly(EndsEarly):
    def kept(self, new: int) -> int:
        return new // CHUNK * CHUNK


class AllButLast(EndsEarly):
    def kept(self, new: int) -> int:
        return max(0, new - 1)


class NotWritten(LightningSubject):
    def store(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        """Leaves the slot as it is."""

    def scatter(self, after: Tensor, layer: int, plan: StatePlan) -> None:
        """Leaves the slots as they are."""


class LongOnly(LightningSubject):
    """One-token requests of an extend leave their state as it was."""

    def store(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        if plan.new_lens[row] > 1:
            super().store(row, state, layer, plan, batch)


class FirstLayerWritten(LightningSubject):
    def store(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        if layer == 0:
            super().store(row, state, layer, plan, batch)

    def scatter(self, after: Tensor, layer: int, plan: StatePlan) -> None:
        if layer == 0:
            super().scatter(after, layer, plan)


class AddedToSlot(LightningSubject):
    """The final state is added to what the slot of a request without prefix held."""

    def store(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        held = 0.0 if plan.prefix_lens[row] else self.pool(layer)[plan.state_indices[row]]
        super().store(row, state + held, layer, plan, batch)


class TransposedOnWrite(LightningSubject):
    def store(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        super().store(row, state.transpose(-1, -2), layer, plan, batch)

    def scatter(self, after: Tensor, layer: int, plan: StatePlan) -> None:
        super().scatter(after.transpose(-1, -2), layer, plan)


class ScaledOnWrite(LightningSubject):
    """The scale of the output reaches the stored state as well."""

    def store(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        super().store(row, state * self.context.scale, layer, plan, batch)

    def scatter(self, after: Tensor, layer: int, plan: StatePlan) -> None:
        super().scatter(after * self.context.scale, layer, plan)


class RoundedState(LightningSubject):
    def store(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        super().store(row, state.bfloat16().float(), layer, plan, batch)

    def scatter(self, after: Tensor, layer: int, plan: StatePlan) -> None:
        super().scatter(after.bfloat16().float(), layer, plan)


class HalfState(LightningSubject):
    def store(self, row: int, state: Tensor, layer: int, plan: StatePlan, batch: Batch) -> None:
        super().store(row, state.half().float(), layer, plan, batch)

    def scatter(self, after: Tensor, layer: int, plan: StatePlan) -> None:
        super().scatter(after.half().float(), layer, plan)


class RoundedProduct(LightningSubject):
    def step(self, before: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        update = (k[..., :, None] * v[..., None, :]).bfloat16().float()
        return before * torch.exp(-self.slopes(layer))[None, :, None, None] + update


class AddedTwice(LightningSubject):
    def step(self, before: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return super().step(before, k * 2, v, layer)


class EmptyRowsCleared(LightningSubject):
    """A row without a token writes the zero state it started from."""

    def extend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        for row, new in enumerate(plan.new_lens):
            if not new:
                self.store(row, torch.zeros_like(self.pool(layer)[0]), layer, plan, batch)
        return super().extend(q, k, v, layer, plan, batch)


class OutputBeforeUpdate(LightningSubject):
    def decode(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        before = self.gather(layer, plan)
        super().decode(q, k, v, layer, plan, batch)
        return torch.einsum("rhd,rhde->rhe", q, before)


def _writes(batch: Case) -> bool:
    return extends(batch) or decodes(batch)


def _empty_with_prefix(batch: Case) -> bool:
    return extends(batch) and any(p and not n for p, n in zip(batch.prefix_lens, batch.new_lens, strict=True))


def _one_token_row(batch: Case) -> bool:
    return extends(batch) and any(n == 1 for _, n in rows(batch))


KIND = "lin-write"
plant("Y43", KIND, "Last partial chunk missing in the state", "the state after the last full chunk written as the final one",
      FullChunksOnly, lambda b: extends(b) and any(n % CHUNK for _, n in rows(b)), EXTENDS, like=("Y44", "Y45"))  # fmt: skip
plant("Y44", KIND, "State written before the last token", "the state before the last token written as the final one",
      AllButLast, extends, EXTENDS, like=("Y43", "Y45"))  # fmt: skip
plant("Y45", KIND, "State not written", "no state written", NotWritten, _writes, WRITES, like=("Y43", "Y44", "Y46"))
plant("Y46", KIND, "State of one-token requests not written", "the state of one-token requests of an extend not written",
      LongOnly, _one_token_row, EXTENDS, like=("Y43", "Y44", "Y45"))  # fmt: skip
plant("Y47", KIND, "State of layer 1 not written", "layer 1's state not written", FirstLayerWritten, _writes, WRITES)
plant("Y48", KIND, "State added to what the slot held", "the final state added to what the slot held", AddedToSlot,
      lambda b: extends(b) and any(not p for p, _ in rows(b)), EXTENDS)  # fmt: skip
plant("Y49", KIND, "State written transposed", "the state written with key and value axes swapped", TransposedOnWrite, _writes, WRITES)
plant("Y50", KIND, "Scale reaches the state", "the written state multiplied by the scale", ScaledOnWrite, _writes, WRITES)
plant("Y51", "precision", "State rounded to bf16", "the written state rounded to bf16", RoundedState, _writes, WRITES)
plant("Y52", "precision", "State rounded to fp16", "the written state rounded to fp16", HalfState, _writes, WRITES)
plant("Y53", "precision", "Update rounded to bf16", "the product of key and value rounded to bf16", RoundedProduct,
      lambda b: decodes(b) or verifies(b), (*DECODES, *VERIFIES))  # fmt: skip
plant("Y54", KIND, "Token counted twice", "each new token added twice in decode or verify", AddedTwice,
      lambda b: decodes(b) or verifies(b), (*DECODES, *VERIFIES))  # fmt: skip
plant("Y55", KIND, "Row without a token clears its state", "zero written to the state of a request without a new token",
      EmptyRowsCleared, _empty_with_prefix, EXTENDS)  # fmt: skip
plant("Y56", KIND, "Output from the state before the update", "decode output read from the state before the update",
      OutputBeforeUpdate, lambda b: decodes(b) and has_prefix(b), DECODES)  # fmt: skip
