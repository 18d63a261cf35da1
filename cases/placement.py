"""Where the logical pages of each request lie in the physical pool: pure integers, decided before any tensor exists."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from attnmatrix.cases.case import Case, Placement, Scratch


@dataclass(frozen=True)
class PoolPlan:
    """Physical pages of a pool.

    ``tables[r][i]`` is the physical page of logical page i of request r; ``scratch_page`` is where padded tokens are
    written (None when the pool has none). Pages in no table are spare: they belong to nobody and hold poison.
    """

    page_size: int
    num_pages: int
    tables: tuple[tuple[int, ...], ...]
    scratch_page: int | None

    @property
    def spare_pages(self) -> tuple[int, ...]:
        """Pages of no request, the scratch page apart."""
        owned = {page for table in self.tables for page in table} | {self.scratch_page}
        return tuple(page for page in range(self.num_pages) if page not in owned)

    def slot(self, request: int, position: int) -> int:
        """``page * page_size + offset`` of one position of a request."""
        return self.tables[request][position // self.page_size] * self.page_size + position % self.page_size


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that ``tokens`` tokens occupy."""
    return -(-tokens // page_size)


def plan_pool(batches: Sequence[Case]) -> PoolPlan:
    """Lay all requests of several batches (same page size, placement and scratch) over one pool.

    Requests are numbered batch by batch. First and last non-scratch pages always belong to a request, spare pages lie
    between. Raises ValueError when the batches disagree about the pool.
    """
    first = batches[0]
    if len({(b.page_size, b.placement, b.scratch, b.spare_pages) for b in batches}) > 1:
        raise ValueError("batches of one pool share page size, placement, scratch page and spare pages")
    page_size, placement = first.page_size, first.placement
    needs = [pages_for(n, page_size) for batch in batches for n in batch.kv_lens]
    shared = _shared_pages(batches) if placement is Placement.SHARED else [(r, 0) for r in range(len(needs))]
    own = [need - take for need, (_, take) in zip(needs, shared, strict=True)]
    live = sum(own)
    spare = 0 if placement is Placement.CONTIGUOUS else 2 + live // 4 + first.spare_pages
    offset = 1 if first.scratch is Scratch.FIRST else 0
    scratch = {Scratch.FIRST: 0, Scratch.LAST: live + spare, Scratch.NONE: None}[first.scratch]
    rng = random.Random(first.data_seed)
    pages = [offset + page for page in _pick(live, live + spare, placement, rng)]
    fresh = _deal(own, pages, placement, batches, rng)
    tables = [[*fresh[donor][:take], *fresh[r]] for r, (donor, take) in enumerate(shared)]
    total = live + spare + (first.scratch is not Scratch.NONE)
    return PoolPlan(page_size, total, tuple(tuple(t) for t in tables), scratch)


def _pick(live: int, total: int, placement: Placement, rng: random.Random) -> list[int]:
    """``live`` of ``total`` pages, the first and the last included, in the order in which they are handed out."""
    if placement is Placement.CONTIGUOUS or live < 2:
        return list(range(live)) if live == total else [total - 1][:live]
    middle = sorted(rng.sample(range(1, total - 1), live - 2))
    pages = [0, *middle, total - 1]
    if placement is Placement.SHUFFLED or placement is Placement.SHARED:
        in_order = list(pages)
        while live > 1 and pages == in_order:
            rng.shuffle(pages)
    return pages


def _deal(own: list[int], pages: list[int], placement: Placement, batches: Sequence[Case], rng: random.Random) -> list[list[int]]:
    if placement is Placement.INTERLEAVED:
        tables: list[list[int]] = [[] for _ in own]
        for turn in range(max(own, default=0)):
            for request, need in enumerate(own):
                if turn < need:
                    tables[request].append(pages[sum(len(t) for t in tables)])
        return tables
    tables, start = [], 0
    for need in own:
        tables.append(pages[start : start + need])
        start += need
    if placement is Placement.SCATTERED:
        prefixes = [p for batch in batches for p in batch.prefix_lens]
        for table, prefix in zip(tables, prefixes, strict=True):
            if batches[0].page_size == 1:
                new = table[prefix:]
                rng.shuffle(new)
                table[prefix:] = new if new != table[prefix:] else new[::-1]
            else:
                table.reverse()
    return tables


def _shared_pages(batches: Sequence[Case]) -> list[tuple[int, int]]:
    """For each request the request whose first pages it shares, and how many: the full pages of the common prefix."""
    result: list[tuple[int, int]] = []
    for batch in batches:
        start = len(result)
        sharers = [r for r, prefix in enumerate(batch.prefix_lens) if prefix >= batch.page_size]
        common = min((batch.prefix_lens[r] for r in sharers), default=0) // batch.page_size
        for request in range(batch.batch_size):
            joins = request in sharers[1:]
            result.append((start + sharers[0], common) if joins else (start + request, 0))
    return result


def shared_prefix_len(case: Case) -> int:
    """Tokens of the common prefix that the requests of a ``shared`` batch hold in the same physical pages."""
    shares = [take for donor, take in _shared_pages([case]) if take] if case.placement is Placement.SHARED else []
    return max(shares, default=0) * case.page_size


def with_placements(case: Case) -> tuple[Case, ...]:
    """The case under every placement that gives a table of its own; the name gets the placement appended.

    Of placements that agree on this case, ``shuffled`` is kept: its pool has spare pages that hold poison.
    """
    variants: list[Case] = []
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for placement in sorted(Placement, key=lambda placement: placement is not Placement.SHUFFLED):
        variant = case.but(placement=placement, name=f"{case.name}.{placement.value}" if case.name else "")
        if placement is Placement.SHARED and not shared_prefix_len(variant):
            continue
        shape = _relative(plan_pool([variant]).tables)
        if shape not in seen:
            seen.add(shape)
            variants.append(variant)
    return tuple(variants)


def _relative(tables: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Tables with physical pages renumbered by rank: spare pages alone do not make another table."""
    rank = {page: index for index, page in enumerate(sorted({page for table in tables for page in table}))}
    return tuple(tuple(rank[page] for page in table) for table in tables)
