"""Faults of the chunked form: what passes from chunk to chunk, and what a chunk's tokens see of each other."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.fault import NotInjected, add
from attnmatrix.harness.faults.lightning_subject import CHUNK, LightningSubject, StatePlan
from attnmatrix.harness.faults.lin_where import EAGER, EXTENDS, Rule, extends, plant, rows

TILE = CHUNK // 2
OVERFLOW = 88.0  # exp of more than this is infinite in float32


def pairs(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, reach: int) -> Tensor:
    """``[n, H, V]``: what the tokens of a chunk see of each other, token i those up to i + ``reach``."""
    index = torch.arange(q.shape[0], device=q.device)
    gap = (index[:, None] - index[None, :]).float()
    within = torch.exp(-slopes[:, None, None] * gap.clamp(min=0)) * (gap >= -reach)
    return torch.einsum("hij,jhe->ihe", torch.einsum("ihd,jhd->hij", q, k) * within, v)


class TileStart(LightningSubject):
    """The state's decay restarts at each tile of a chunk."""

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        out, after = super().chunk(q, k, v, state, slopes)
        index = torch.arange(q.shape[0], device=q.device)
        right, tiled = (torch.exp(-slopes[None, :] * (steps[:, None] + 1)) for steps in (index, index % TILE))
        return out + torch.einsum("ihd,hde->ihe", q * (tiled - right)[..., None], state), after


class FactoredDecay(LightningSubject):
    """One chunk for the whole request, its decays factored as exp(g_t) * exp(-g_s)."""

    def extend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        out, start, slopes = torch.full_like(q, float("nan")), 0, self.slopes(layer)
        for row, new in enumerate(plan.new_lens):
            cut = slice(start, start + new)
            start += new
            if new:
                state = self.initial_state(row, layer, plan, batch)
                steps = torch.arange(1, new + 1, device=q.device)
                down = torch.exp(-slopes[None, :] * steps[:, None])[..., None]
                up = torch.exp(slopes[None, :] * steps[:, None])[..., None]
                scores = torch.einsum("ihd,jhd->hij", q[cut] * down, k[cut] * up).tril()
                out[cut] = torch.einsum("hij,jhe->ihe", scores, v[cut]) + torch.einsum("ihd,hde->ihe", q[cut] * down, state)
                last = down[-1, :, :, None]
                self.store(row, state * last + torch.einsum("ihd,ihe->hde", k[cut] * up, v[cut]) * last, layer, plan, batch)
        return out


class RememberedChunks(LightningSubject):
    """The chunk table is cached by the number of requests: a later batch of that size is cut into the first one's chunks."""

    def extend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        self.tables: dict[int, tuple[int, ...]] = getattr(self, "tables", {})
        known = self.tables.setdefault(len(plan.new_lens), plan.new_lens)
        out, start = torch.full_like(q, float("nan")), 0
        for row, new in enumerate(plan.new_lens):
            begins = [start + CHUNK * index for index in range(-(-known[row] // CHUNK)) if CHUNK * index < new]
            if begins:
                state = self.initial_state(row, layer, plan, batch)
                for begin in begins:
                    cut = slice(begin, min(begin + CHUNK, start + new))
                    out[cut], state = self.chunk(q[cut], k[cut], v[cut], state, self.slopes(layer))
                self.store(row, state, layer, plan, batch)
            start += new
        return out


class NoCarry(LightningSubject):
    """Each chunk starts from the request's initial state."""

    def extend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: StatePlan, batch: Batch) -> Tensor:
        out, start = torch.full_like(q, float("nan")), 0
        for row, new in enumerate(plan.new_lens):
            if new:
                initial = state = self.initial_state(row, layer, plan, batch)
                for begin in range(start, start + new, CHUNK):
                    cut = slice(begin, min(begin + CHUNK, start + new))
                    out[cut], state = self.chunk(q[cut], k[cut], v[cut], initial, self.slopes(layer))
                self.store(row, state, layer, plan, batch)
            start += new
        return out


class OwnTokenMissing(LightningSubject):
    def chunk(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        out, after = super().chunk(q, k, v, state, slopes)
        return out + pairs(q, k, v, slopes, -1) - pairs(q, k, v, slopes, 0), after


class NextTokenSeen(LightningSubject):
    def chunk(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        out, after = super().chunk(q, k, v, state, slopes)
        return out + pairs(q, k, v, slopes, 1) - pairs(q, k, v, slopes, 0), after


class UndecayedPairs(LightningSubject):
    """Decay between chunks only."""

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        out, after = super().chunk(q, k, v, state, slopes)
        return out + pairs(q, k, v, torch.zeros_like(slopes), 0) - pairs(q, k, v, slopes, 0), after


class UndecayedTail(LightningSubject):
    """A chunk's tokens join the state without the decay of the tokens after them."""

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        out, _ = super().chunk(q, k, v, state, slopes)
        kept = state * torch.exp(-slopes * q.shape[0])[:, None, None]
        return out, kept + torch.einsum("ihd,ihe->hde", k, v)


class FullChunkDecay(LightningSubject):
    """The state decays by a full chunk over a partial one."""

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        out, after = super().chunk(q, k, v, state, slopes)
        full, right = (state * torch.exp(-slopes * steps)[:, None, None] for steps in (CHUNK, q.shape[0]))
        return out, after + full - right


class OneTokenMoreDecay(LightningSubject):
    """The state after a chunk has decayed by one token too many."""

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        out, after = super().chunk(q, k, v, state, slopes)
        return out, after * torch.exp(-slopes)[:, None, None]


def _longer_than(limit: int) -> Rule:
    return lambda batch: extends(batch) and any(n > limit for _, n in rows(batch))


def _tile_matters(batch: Case) -> bool:
    return extends(batch) and any(n > (TILE if p else CHUNK + TILE) for p, n in rows(batch))


def _steep(batch: Case) -> bool:
    if not extends(batch):
        return False
    lower = 1 << (batch.heads.q.bit_length() - 1)
    steepest = 2.0 ** -(8.0 / lower)
    return steepest * max(batch.new_lens) > OVERFLOW


def _unlike_first(case: Case, mode: RunnerMode) -> bool:
    """A batch needs more chunks for one of its requests than the first batch of as many requests."""
    first: dict[int, tuple[int, ...]] = {}
    for batch in schedule(case, mode).batches:
        known = first.setdefault(batch.batch_size, batch.new_lens)
        if any(-(-new // CHUNK) > -(-old // CHUNK) for old, new in zip(known, batch.new_lens, strict=True)):
            return True
    return False


KIND = "lin-chunk"
plant("B122", KIND, "Initial state decays too little inside a chunk", "the state's decay counted from the start of a tile, not of its chunk",
      TileStart, _tile_matters, EXTENDS, "vllm-project/vllm#21783")  # fmt: skip
plant("B127", KIND, "Exponent of decay difference turns large and positive", "decays factored over the whole request, which overflow",
      FactoredDecay, _steep, EXTENDS, "fla-org/flash-linear-attention#77")  # fmt: skip
plant("B128", KIND, "Chunk table cached under a key that another batch shares", "the chunk table of the first batch of as many requests",
      RememberedChunks, extends, EAGER, "QwenLM/FlashQLA#23", also=_unlike_first)  # fmt: skip
add(NotInjected("B129", KIND, "Causal conv output cut from the wrong end", "pending", "waits for a kind with a causal convolution"))
plant("Y36", KIND, "State not carried from chunk to chunk", "every chunk started from the request's initial state", NoCarry,
      _longer_than(CHUNK), EXTENDS)  # fmt: skip
plant("Y37", KIND, "Own token missing", "tokens that do not see themselves in an extend", OwnTokenMissing, extends, EXTENDS)
plant("Y38", KIND, "Next token seen", "tokens of a chunk that see the next one", NextTokenSeen, _longer_than(1), EXTENDS)
plant("Y39", KIND, "No decay inside a chunk", "no decay between the tokens of a chunk", UndecayedPairs, _longer_than(1), EXTENDS)
plant(
    "Y40", KIND, "Tokens join the state undecayed", "a chunk's tokens added to the state undecayed", UndecayedTail, _longer_than(1), EXTENDS
)
plant("Y41", KIND, "Partial chunk decays as a full one", "the state decayed by a full chunk over a partial one", FullChunkDecay,
      lambda b: extends(b) and any(n % CHUNK and (p or n > CHUNK) for p, n in rows(b)), EXTENDS)  # fmt: skip
plant(
    "Y42", KIND, "State decays once more after a chunk", "the state decayed once more after each chunk", OneTokenMoreDecay, extends, EXTENDS
)
