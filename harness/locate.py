"""Where a failing result lies: request, position, head, page and slot of its worst row, and how the bad rows are spread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.placement import PoolPlan, plan_pool
from attnmatrix.cases.schedule import Schedule
from attnmatrix.harness.measure import Measurement


@dataclass(frozen=True)
class Location:
    """The worst row of one measurement, and the share of its rows over their limit, by request and by head.

    ``request`` counts within the batch, ``position`` within the request; ``page`` and ``slot`` are those of the token's key. None
    where the quantity has no such axis.
    """

    quantity: str
    step: int
    layer: int
    request: int
    head: int | None
    token: int | None
    position: int | None
    page: int | None
    slot: int | None
    by_request: tuple[float, ...]
    by_head: tuple[float, ...]

    def __str__(self) -> str:
        parts = [f"{self.quantity} of step {self.step}, layer {self.layer}: worst in request {self.request}"]
        if self.position is not None:
            parts.append(f"position {self.position}")
        if self.head is not None:
            parts.append(f"head {self.head}")
        if self.slot is not None:
            parts.append(f"page {self.page}, slot {self.slot}")
        return f"{', '.join(parts)}; bad rows by request {_shares(self.by_request)}, by head {_shares(self.by_head)}"


def locate(measurement: Measurement, batch: Case, plan: PoolPlan, first_request: int) -> Location:
    """Where ``measurement``, of a step that ran ``batch``, is worst. The batch's requests are ``first_request`` and the following
    ones of the pool ``plan``."""
    ratio = measurement.ratio.view(measurement.shape)
    axes = dict(zip(measurement.labels, _unravel(measurement.worst, measurement.shape), strict=True))
    if "token" in axes:
        owners = torch.tensor([r for r, new in enumerate(batch.new_lens) for _ in range(new)])
    else:
        owners = torch.tensor(
            [r for r, track in enumerate(batch.track_lens) if track] if "snapshot" in axes else list(range(batch.batch_size))
        )
    bad = (ratio > 1).cpu()
    token, position, page, slot = axes.get("token"), None, None, None
    request = int(owners[token]) if token is not None else int(owners[axes.get("snapshot", axes.get("request", 0))])
    if token is not None:
        own = token - sum(batch.new_lens[:request])
        position = batch.prefix_lens[request] + batch.depths(request)[own]
        if batch.kind is AttentionKind.SOFTMAX:
            slot = plan.slot(first_request + request, batch.prefix_lens[request] + own)
            page = slot // plan.page_size
    by_request = tuple(float(bad[owners == r].float().mean()) if bool((owners == r).any()) else 0.0 for r in range(batch.batch_size))
    head_axis = measurement.labels.index("head") if "head" in measurement.labels else None
    by_head = () if head_axis is None else tuple(bad.movedim(head_axis, 0).flatten(1).float().mean(dim=1).tolist())
    return Location(
        measurement.quantity, measurement.step, measurement.layer, request, axes.get("head"), token, position, page, slot, by_request, by_head
    )  # fmt: skip


def locate_worst(measurements: Iterable[Measurement], plan: Schedule) -> Location | None:
    """Where the worst of a trial's measurements is, whose batches were those of ``plan``; None when none is over its limit."""
    wrong = [m for m in measurements if m.error.numel() and float(m.ratio.max()) > 1]
    if not wrong:
        return None
    worst = max(wrong, key=lambda m: float(m.ratio.max()))
    return locate(worst, plan.batches[worst.step], plan_pool(plan.owners), plan.requests[worst.step].start)


def _unravel(index: int, shape: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    for extent in reversed(shape):
        found.append(index % extent)
        index //= extent
    return found[::-1]


def _shares(shares: tuple[float, ...]) -> str:
    """``0: 100 %, 2: 50 %``: those that have bad rows."""
    return ", ".join(f"{index}: {100 * share:.0f} %" for index, share in enumerate(shares) if share > 0) or "none"
