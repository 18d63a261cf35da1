"""req_to_token: which physical slot holds each position of each request, and what stands where nothing belongs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.cases.placement import PoolPlan
from attnmatrix.harness.probes import Poison

SPARE_ROWS = 3  # rows (and state slots) of no request


def spread(count: int, seed: int) -> list[int]:
    """``count`` of ``count + SPARE_ROWS`` indices in random order, the first and the last among them."""
    rng, last = random.Random(seed ^ 0x5EED), count + SPARE_ROWS - 1
    if count < 2:
        return [last] * count
    chosen = [0, last, *rng.sample(range(1, last), count - 2)]
    while chosen == sorted(chosen):
        rng.shuffle(chosen)
    return chosen


def token_rows(plan: PoolPlan, lens: Sequence[int], poison: Poison, seed: int) -> Tensor:
    """int32 ``[requests + SPARE_ROWS, max_len]`` on the CPU, one page wider than the longest request: the row of each request, then those of
    nobody.

    Entries past a request's length are valid slots that it mostly does not own.
    """
    size = plan.page_size
    width = -(-max([1, *lens]) // size) * size + size
    rng, targets = random.Random(seed ^ 0x7AB1E), _padding_targets(plan, poison)
    table = torch.empty(len(lens) + SPARE_ROWS, width, dtype=torch.int32)
    columns = torch.arange(width) % size
    for row in range(table.shape[0]):
        pages = torch.tensor([rng.choice(targets) for _ in range(width // size)])
        table[row] = (pages.repeat_interleave(size) * size + columns).int()
    for request, pages_of in enumerate(plan.tables):
        if pages_of:
            slots = torch.tensor(pages_of).repeat_interleave(size) * size + columns[: len(pages_of) * size]
            table[request, : len(slots)] = slots.int()
    return table


def keep_ends(rows: Tensor, before: Sequence[int], after: Sequence[int], batch: Case) -> None:
    """Let every other request of ``after`` whose pages number three or more have the first and the last page of the request of ``before`` whose
    place it takes: a table that is known again by its ends is another all the same. Changes ``rows`` of :func:`token_rows`."""
    size = batch.page_size
    for old, new, length in list(zip(before, after, batch.kv_lens, strict=True))[::2]:
        last = (length - 1) // size * size
        if last >= 2 * size:
            for page in (slice(0, size), slice(last, last + size)):
                rows[new, page] = rows[old, page]


def token_table(rows: Tensor, places: Sequence[int]) -> Tensor:
    """The rows of :func:`token_rows` as a table: that of request r at ``places[r]``, those of nobody in between. Requests behind the last
    place have none of their own."""
    nobody = iter(range(len(rows) - SPARE_ROWS, len(rows)))
    request_at = {place: request for request, place in enumerate(places)}
    order = [request_at[place] if place in request_at else next(nobody) for place in range(len(places) + SPARE_ROWS)]
    return rows[order]


def _padding_targets(plan: PoolPlan, poison: Poison) -> list[int]:
    """Pages that table entries past a request's last page point to: any page, but for the NaN tiers, which tell them apart."""
    everything, spare = list(range(max(1, plan.num_pages))), plan.spare_pages
    if poison in (Poison.NAN_PADDING, Poison.NAN_TAIL):
        return list(spare) or everything
    if poison is Poison.NAN_UNREFERENCED:
        return [page for page in everything if page not in spare] or everything
    return everything
