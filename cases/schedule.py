"""The batches that a runner mode drives for one case: the case itself and others derived from it, in one pool."""

from __future__ import annotations

import random
from dataclasses import dataclass

from attnmatrix.cases.case import Case, ForwardMode
from attnmatrix.cases.handoff import conversation
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.options import Tree

LONG = 256  # prefixes above this are shortened in derived batches
LONG_NEW = 40  # and new lengths above this


@dataclass(frozen=True)
class Step:
    """One batch; graph modes pad it to ``padded`` requests (cg_decode, verify_cg) or tokens (pcg, bcg extend).

    ``fill`` says what padded rows carry: ``production`` (length 1, request row 0) or ``stale`` (what the buffers held).
    """

    case: Case
    padded: int
    fill: str = "production"


@dataclass(frozen=True)
class Schedule:
    """``captures``: the sizes captured, in requests or tokens; ``steps``: the batches run, in order. ``continued``: each step goes on
    with the requests of the one before, whose tokens it has cached; else every step has requests of its own."""

    captures: tuple[int, ...]
    steps: tuple[Step, ...]
    continued: bool = False

    @property
    def batches(self) -> tuple[Case, ...]:
        return tuple(step.case for step in self.steps)

    def first(self) -> Schedule:
        """The first batch alone, in the size captured for it."""
        step = self.steps[0]
        return Schedule((step.padded,) if self.captures else (), (step,))

    @property
    def owners(self) -> tuple[Case, ...]:
        """The batches whose requests, at their longest, own the pages of the pool."""
        return self.batches[-1:] if self.continued else self.batches


def schedule(case: Case, mode: RunnerMode) -> Schedule:
    """The batches of one cell. Deterministic in the case's content.

    Eager modes: the case and a sibling, to be prepared together before either runs. Graph modes: two captured sizes whose
    replays alternate. Those of each shrink, in requests and in lengths, and then grow; the smaller size pads as engines do,
    the larger one leaves stale rows. A lone request cannot become fewer, so its smaller size gets a fourth replay, before it.
    Handoff: the turns of one conversation.
    """
    if mode is RunnerMode.HANDOFF:
        return Schedule((), tuple(Step(turn, 0) for turn in conversation(case)), continued=True)
    if not mode.uses_graph:
        return Schedule((), (Step(case, case.batch_size), Step(vary(case, max(1, case.batch_size), 1), 0)))
    size = case.batch_size
    small, large = size + 1, 2 * size + 2
    turns = [(size, 0), (large - 1, 1), (size - 1, -1), (small, -1), (small, 1), (large, 1)]
    if size == 1:
        turns = [(1, 0), (large - 1, 1), (small, 1), (small, -1), (1, -1), (large, 1), (small, 1)]
    batches = [vary(case, count, salt, trend) if salt else case for salt, (count, trend) in enumerate(turns)]
    if mode.pads_tokens:
        odd, even = [b.num_tokens for b in batches[1::2]], [b.num_tokens for b in batches[0::2]]
        small, large = max(even) + 3, max(*odd, max(even) + 3) + 5
    captures = (small, large)
    return Schedule(
        captures,
        tuple(Step(batch, captures[index % 2], "stale" if index % 2 else "production") for index, batch in enumerate(batches)),
    )


def vary(case: Case, size: int, salt: int, trend: int = 0) -> Case:
    """A batch like ``case`` with ``size`` requests, other lengths and other data; options stay.

    Request i resembles request ``i % batch_size``; its lengths are larger with ``trend`` 1, smaller with -1. A request
    without prefix stays without, so that both paths are met again; long prefixes and new lengths are shortened to keep
    derived batches cheap. A tree that all requests shared differs between them, so that no mask can be a constant.
    """
    if case.batch_size == 0:
        return case.but(seed=case.seed + salt)
    rng = random.Random(case.data_seed + salt)
    order = [index % case.batch_size for index in range(size)]
    rng.shuffle(order)
    page = case.page_size if case.page_size <= 64 else 5
    steps = [step for step in (-3, -2, -1, 1, 2, 3, page) if step * trend >= 0]
    prefixes, news = [], []
    for source in order:
        prefix, new = case.prefix_lens[source], case.new_lens[source]
        if prefix:
            base = prefix if prefix <= LONG else rng.randrange(LONG // 2, LONG)
            prefix = max(1, base + rng.choice(steps))
        if new and _free_length(case):
            new = max(1, min(new, LONG_NEW) + rng.choice([step for step in (-2, -1, 0, 1, 2, 3) if step * trend >= 0]))
        prefixes.append(prefix)
        news.append(new)
    trees = tuple(case.tree(source) for source in order) if len(case.trees) > 1 else case.trees
    if len(trees) == 1:
        trees = tuple(_regrafted(trees[0], salt + index) for index in range(size))
    return case.but(prefix_lens=tuple(prefixes), new_lens=tuple(news), trees=trees, seed=case.seed + salt)


def _regrafted(tree: Tree, turns: int) -> Tree:
    """The tree with its last node hung elsewhere: its parent moved ``turns`` nodes on, around the end."""
    return (*tree[:-1], (tree[-1] + 1 + turns) % len(tree) - 1)


def _free_length(case: Case) -> bool:
    """Whether new lengths may vary: verify captures a fixed number of drafts per request, decode has one token."""
    return case.forward in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND)
