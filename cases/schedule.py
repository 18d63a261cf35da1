"""The batches that a runner mode drives for one case: the case itself and others derived from it, in one pool."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache

from attnmatrix.cases.case import Case, ForwardMode
from attnmatrix.cases.handoff import conversation
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.options import Tree
from attnmatrix.cases.story import parse_story

LONG = 256  # prefixes above this are shortened in derived batches
LONG_NEW = 40  # and new lengths above this
RECYCLED = ("recycled_rows", "recycled_pages")
"""What other requests may take over, see :class:`Step`."""


@dataclass(frozen=True)
class Step:
    """One batch; graph modes pad it to ``padded`` requests (cg_decode, verify_cg) or tokens (pcg, bcg extend).

    ``fill`` says what padded rows carry: ``production`` (length 1, request row 0) or ``stale`` (what the buffers held).
    ``follows`` says what the batch has of the one before: ``same`` requests; ``renew`` (new requests without prefix in their slots);
    ``resume`` (other requests, from the snapshots); or, of other requests with the same lengths, ``recycled_rows`` (their request rows, now
    over other pages and state slots, but for the first and the last page of every other request) and ``recycled_pages`` (rows, pages and
    slots, which hold other keys, values and states by now). ``accepted`` draft tokens of each request are committed after it.
    """

    case: Case
    padded: int
    fill: str = "production"
    follows: str = ""
    accepted: tuple[int, ...] | None = None

    @property
    def recycles(self) -> bool:
        """Whether other requests take over places of those before, which lie ready only when those are done."""
        return self.follows in RECYCLED


@dataclass(frozen=True)
class Schedule:
    """``captures``: the sizes captured, in requests or tokens; ``steps``: the batches run, in order."""

    captures: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def batches(self) -> tuple[Case, ...]:
        return tuple(step.case for step in self.steps)

    def first(self) -> Schedule:
        """The first batch alone, in the size captured for it."""
        step = self.steps[0]
        return Schedule((step.padded,) if self.captures else (), (step,))

    @property
    def requests(self) -> tuple[range, ...]:
        """The requests of each batch, numbered over the whole schedule. Requests that take over pages or slots have the numbers of those
        before."""
        numbers: list[range] = []
        start = 0
        for step in self.steps:
            if step.follows in ("same", "renew", "recycled_pages"):
                numbers.append(numbers[-1])
                continue
            numbers.append(range(start, start + step.case.batch_size))
            start = numbers[-1].stop
        return tuple(numbers)

    @property
    def owners(self) -> tuple[Case, ...]:
        """The batches that pages are laid out for: each request once, at its longest."""
        if not any(step.follows and not step.recycles for step in self.steps):
            return tuple(step.case for step in self.steps if step.follows != "recycled_pages")
        longest: dict[range, tuple[int, ...]] = {}
        for requests, batch in zip(self.requests, self.batches, strict=True):
            known = longest.get(requests, batch.kv_lens)
            longest[requests] = tuple(max(pair) for pair in zip(known, batch.kv_lens, strict=True))
        plain = self.batches[0].but(track_lens=(), trees=(), draft_kind=None, forward=ForwardMode.EXTEND, prefix_lens=(), new_lens=())
        return tuple(plain.but(prefix_lens=(0,) * len(lens), new_lens=lens) for lens in longest.values())


def schedule(case: Case, mode: RunnerMode, recycled: str = "") -> Schedule:
    """The batches of one cell. Deterministic in the case's content.

    A story: the case and what its requests do next. Eager modes: the case and a sibling, to be prepared together before either runs.
    ``recycled``, one of ``RECYCLED``, adds other requests with the lengths of the last batch in its places, to neither stories nor handoff.
    Graph modes: two captured sizes whose replays alternate. Those of each shrink, in requests and in lengths, and then grow; the smaller
    size pads as engines do, the larger one leaves stale rows. A lone request cannot become fewer, so its smaller size gets a fourth replay, before it.
    Handoff: the turns of one conversation.
    """
    if mode is RunnerMode.HANDOFF:
        return Schedule((), tuple(Step(turn, 0, follows="same" if number else "") for number, turn in enumerate(conversation(case))))
    if case.story:
        return Schedule((), story_steps(case))
    if not mode.uses_graph:
        return Schedule((), _recycled((Step(case, case.batch_size), Step(vary(case, max(1, case.batch_size), 1), 0)), recycled))
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
    steps = tuple(Step(batch, captures[index % 2], "stale" if index % 2 else "production") for index, batch in enumerate(batches))
    return Schedule(captures, _recycled(steps, recycled))


def _recycled(steps: tuple[Step, ...], places: str) -> tuple[Step, ...]:
    """The steps, and other requests in ``places`` of the last one."""
    last = steps[-1]
    if not places or not last.case.batch_size:
        return steps
    return (*steps, replace(last, case=last.case.but(seed=last.case.seed + 1), follows=places))


@lru_cache(maxsize=64)
def story_steps(case: Case) -> tuple[Step, ...]:
    """The case's own batch and the later batches of its story, in order, each with the lengths that those before it left."""
    own = case.but(story="")
    steps = [Step(own, own.batch_size)]
    lens = own.kv_lens
    for turn in parse_story(case.story):
        counts, last = turn.of(case.batch_size), steps[-1]
        if turn.action == "others":
            steps.append(Step(vary(own, case.batch_size, len(steps)), case.batch_size))
            continue
        if turn.action == "accept":
            steps[-1] = Step(last.case, last.padded, last.fill, last.follows, counts)
            lens = tuple(p + taken for p, taken in zip(last.case.prefix_lens, counts, strict=True))
            continue
        follows = turn.action if turn.action in ("renew", "resume") else "same"
        if follows == "renew":
            lens = (0,) * case.batch_size
        elif follows == "resume":
            lens = tuple(p + track for p, track in zip(own.prefix_lens, own.track_lens, strict=True))
        forward = {"decode": ForwardMode.DECODE, "verify": ForwardMode.TARGET_VERIFY}.get(turn.action, ForwardMode.EXTEND)
        batch = own.but(
            forward=forward,
            prefix_lens=lens,
            new_lens=counts,
            track_lens=(),
            draft_kind=case.draft_kind if turn.action == "verify" else None,
            seed=case.seed + len(steps),
        )
        steps.append(Step(batch, batch.batch_size, follows=follows))
        lens = batch.kv_lens
    return tuple(steps)


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
    prefixes, news, tracks = [], [], []
    for source in order:
        prefix, new = case.prefix_lens[source], case.new_lens[source]
        if prefix:
            base = prefix if prefix <= LONG else rng.randrange(LONG // 2, LONG)
            prefix = max(1, base + rng.choice(steps))
        if new and _free_length(case):
            new = max(1, min(new, LONG_NEW) + rng.choice([step for step in (-2, -1, 0, 1, 2, 3) if step * trend >= 0]))
        prefixes.append(prefix)
        news.append(new)
        if case.track_lens:
            track = case.track_lens[source]
            tracks.append(new if track == case.new_lens[source] else min(track, new))
    trees = tuple(case.tree(source) for source in order) if len(case.trees) > 1 else case.trees
    if len(trees) == 1:
        trees = tuple(_regrafted(trees[0], salt + index) for index in range(size))
    return case.but(prefix_lens=tuple(prefixes), new_lens=tuple(news), track_lens=tuple(tracks), trees=trees, seed=case.seed + salt)


def _regrafted(tree: Tree, turns: int) -> Tree:
    """The tree with its last node hung elsewhere: its parent moved ``turns`` nodes on, around the end."""
    return (*tree[:-1], (tree[-1] + 1 + turns) % len(tree) - 1)


def _free_length(case: Case) -> bool:
    """Whether new lengths may vary: verify captures a fixed number of drafts per request, decode has one token."""
    return case.forward in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND)
