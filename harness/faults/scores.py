"""Scores scaled, capped, biased or given a sink wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnmatrix.cases.case import Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import Partial, Plan, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import (
    DECODE,
    EAGER,
    decodes,
    has_prefix,
    plant,
    several_tokens,
    splits,
)
from attnmatrix.references.slopes import alibi_slopes


class CapAfterMask(SoftmaxSubject):
    def attend(self, scores: Tensor, visible: Tensor, values: Tensor, layer: int, batch: Batch) -> Tensor:
        cap = self.context.soft_cap
        if cap is None:
            return super().attend(scores, visible, values, layer, batch)
        capped = torch.where(visible[:, None], scores, -cap)
        return super().attend(capped, torch.ones_like(visible), values, layer, batch)


class SinkInEverySplit(SoftmaxSubject):
    def merge(self, parts: Sequence[Partial]) -> Tensor:
        sink = super().sink()
        return super().merge(parts if sink is None else [self._seeded(part, sink) for part in parts])

    def _seeded(self, part: Partial, sink: Tensor) -> Partial:
        lse = torch.logaddexp(part.lse, sink.expand_as(part.lse))
        lse = torch.where(torch.isneginf(part.lse), part.lse, lse)
        share = torch.exp(part.lse - torch.where(torch.isfinite(lse), lse, 0.0))
        return replace(part, out=part.out * share[..., None], lse=lse)

    def sink(self) -> Tensor | None:
        return None


class SlopesOfRank(SoftmaxSubject):
    def alibi(self, layer: int) -> Tensor:
        right = super().alibi(layer)
        local = len(right) // 2
        return torch.cat([alibi_slopes(local), alibi_slopes(len(right) - local)]).to(right)


class AlibiSign(SoftmaxSubject):
    def alibi(self, layer: int) -> Tensor:
        return -super().alibi(layer)


class SinkOfRow(SoftmaxSubject):
    """The sink of head h is that of row ``(h * tokens + token) % heads``: right with a single token."""

    tokens = 1

    def merge(self, parts: Sequence[Partial]) -> Tensor:
        self.tokens = parts[0].lse.shape[1]
        return super().merge(parts)

    def sink(self) -> Tensor | None:
        sink = super().sink()
        if sink is None:
            return None
        head, token = torch.arange(len(sink), device=sink.device), torch.arange(self.tokens, device=sink.device)
        return sink[(head[None, :] * self.tokens + token[:, None]) % len(sink)]


class SinkOfNeighbour(SoftmaxSubject):
    def sink(self) -> Tensor | None:
        sink = super().sink()
        return None if sink is None else sink.roll(1)


class NoSinkInDecode(SoftmaxSubject):
    def sink(self) -> Tensor | None:
        return None if self.context.forward_mode is ForwardMode.DECODE else super().sink()


class ScaleByDim(SoftmaxSubject):
    def scale(self, layer: int) -> float:
        return 1.0 / self.context.heads.dim


class ScaleOnePercentLarge(SoftmaxSubject):
    def scale(self, layer: int) -> float:
        return self.context.scale * 1.01


class KeyScaleApplied(SoftmaxSubject):
    """A checkpoint's key scale multiplied in although the cache is not quantised."""

    def scale(self, layer: int) -> float:
        return self.context.scale * 0.06


class NoCapInLayerOne(SoftmaxSubject):
    def scores(self, queries: Tensor, keys: Tensor, plan: Plan, rows: Tensor, layer: int, batch: Batch) -> Tensor:
        if layer == 0 or self.context.soft_cap is None:
            return super().scores(queries, keys, plan, rows, layer, batch)
        return torch.einsum("rnhd,rlhd->rhnl", queries.float(), self.expand(keys.float())) * self.scale(layer)


class CapBeforeScale(SoftmaxSubject):
    def scores(self, queries: Tensor, keys: Tensor, plan: Plan, rows: Tensor, layer: int, batch: Batch) -> Tensor:
        cap = self.context.soft_cap
        if cap is None:
            return super().scores(queries, keys, plan, rows, layer, batch)
        return cap * torch.tanh(torch.einsum("rnhd,rlhd->rhnl", queries.float(), self.expand(keys.float())) / cap) * self.scale(layer)


class NoBiasForCached(SoftmaxSubject):
    """The bias is left out for cached keys."""

    def scores(self, queries: Tensor, keys: Tensor, plan: Plan, rows: Tensor, layer: int, batch: Batch) -> Tensor:
        right = super().scores(queries, keys, plan, rows, layer, batch)
        if self.context.alibi_slopes is None:
            return right
        cached = torch.arange(right.shape[-1], device=right.device) < self.prefix(plan)[:, None]
        distance = self.key_positions(plan, rows, batch)[:, None, :] - plan.positions[rows][..., None]
        return right - self.alibi(layer)[None, :, None, None] * (distance * cached[:, None, :])[:, None]


class NoBias(SoftmaxSubject):
    def alibi(self, layer: int) -> Tensor:
        return super().alibi(layer) * 0.0


class WithLse(SoftmaxSubject):
    """Returns the LSE too."""

    def forward_with_lse(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> tuple[Tensor, Tensor]:
        out, plan = self.forward(q, k, v, layer_id, batch), batch.attn_metadata
        keys, _ = self.read(self.slots(plan, layer_id, batch), layer_id, batch)
        rows, present = self.rows(plan, batch)
        scores = self.scores(self.queries(q, rows, plan, batch), keys, plan, rows, layer_id, batch)
        visible = self.visible(plan, rows, layer_id, batch) & present[..., None]
        lse = torch.logsumexp(scores.masked_fill(~visible[:, None], float("-inf")), dim=-1)
        lse = lse + self.shift(plan, layer_id)[..., None]
        sink = self.sink()
        if sink is not None:
            lse = torch.logaddexp(lse, sink[None, :, None].expand_as(lse))
        found = q.new_empty(q.shape[0] + 1, q.shape[1], dtype=torch.float32)
        target = torch.where(present, rows, q.shape[0])
        return out, found.index_put((target.flatten(),), lse.transpose(1, 2).flatten(0, 1))[: q.shape[0]]

    def shift(self, plan: Plan, layer: int) -> Tensor:
        """float32 ``[R, Hq]`` in nats: what each request's LSE is off by."""
        return torch.zeros(len(plan.cache_seqlens), self.context.heads.q, device=plan.cache_seqlens.device)


class LseOfIndices(WithLse):
    """The softmax sees distances from the query's index among the new tokens, which changes all scores of a row alike."""

    def shift(self, plan: Plan, layer: int) -> Tensor:
        return self.prefix(plan)[:, None] * self.alibi(layer)[None, :]


def _capped(case: Case) -> bool:
    return case.soft_cap is not None


def _sinks(case: Case) -> bool:
    return case.sinks


def _more_than_one_key(case: Case) -> bool:
    return max(case.kv_lens) > 1


plant("B68", "the soft cap applied after the mask", CapAfterMask, _capped)
plant("B69", "the sink counted in every split with a key", SinkInEverySplit, lambda case: case.sinks and splits(case))
plant("B70", "the ALiBi slopes of half the heads given to each half", SlopesOfRank, lambda case: case.alibi and _more_than_one_key(case))
plant("B72", "the sink taken by row instead of by head", SinkOfRow, lambda case: case.sinks and several_tokens(case))
plant("B102", "a key scale multiplied into the scores of an unquantised cache", KeyScaleApplied, _more_than_one_key)
plant("X25", "the scale 1 / dim", ScaleByDim, _more_than_one_key, kind="score-mod", title="Scale without the square root")
plant("X26", "the scale 1 % too large", ScaleOnePercentLarge, _more_than_one_key, kind="score-mod", title="Scale 1 % too large")
plant("X27", "the ALiBi bias with the opposite sign", AlibiSign, lambda case: case.alibi and _more_than_one_key(case), kind="score-mod",
      title="ALiBi sign")  # fmt: skip
plant("X28", "the sink of the neighbouring head", SinkOfNeighbour, _sinks, kind="score-mod", title="Sink of the neighbouring head")
plant("X29", "the sinks left out in decode", NoSinkInDecode, lambda case: case.sinks and decodes(case), DECODE, kind="score-mod",
      title="Sinks dropped in decode")  # fmt: skip
plant("X30", "the soft cap left out in layer 1", NoCapInLayerOne, _capped, kind="score-mod", title="Soft cap in one layer only")
plant("X31", "the soft cap applied before the scale", CapBeforeScale, _capped, kind="score-mod", title="Soft cap before the scale")
plant("X32", "no ALiBi bias for cached keys", NoBiasForCached, lambda case: case.alibi and has_prefix(case), kind="score-mod",
      title="ALiBi bias for new keys only", like=("X59",))  # fmt: skip
plant("X59", "no ALiBi bias", NoBias, lambda case: case.alibi and _more_than_one_key(case), kind="score-mod", title="ALiBi dropped",
      like=("X32",))  # fmt: skip
plant("X69", "ALiBi distances in the LSE counted from the query's index among the new tokens", LseOfIndices,
      lambda case: case.alibi and has_prefix(case), (*EAGER, RunnerMode.VERIFY), kind="score-mod", title="LSE shifted by ALiBi",
      healthy=WithLse)  # fmt: skip
