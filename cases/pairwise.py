"""A small subset of a suite that still meets every pair of axis values the suite meets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.schedule import story_steps
from attnmatrix.cases.story import parse_story

STATE_WORK = 60  # a token's share of a state's update, in keys
SOME_WORK = 200_000  # what a case costs besides, in units of ``work``
Pair = tuple[tuple[str, object], tuple[str, object]]


def axis_values(case: Case) -> dict[str, object]:
    """The axes a subset must keep covering, two at a time."""
    prefixes, news = case.prefix_lens, case.new_lens
    paged = case.kind is AttentionKind.SOFTMAX  # a state pool has no pages
    return {
        "forward": (case.forward, case.batch_size > 1),  # strides, slots and lengths tell nothing of a lone request
        "page": case.page_size if paged else 0,
        "dtype": case.dtype,
        "dim": case.heads.dim,
        "prefix": (0 in prefixes, any(prefixes)),
        "new": (0 in news, news.count(1) == len(news), len(set(news)) == 1),
        "window": case.window is not None,
        "cap": case.soft_cap is not None,
        "sinks": case.sinks,
        "alibi": case.alibi,
        "strided": case.strided,
        "low": case.score_drop > 0,
        "trees": bool(case.trees),
    }


def single_values(case: Case) -> dict[str, object]:
    """The axes of which each value must stay, on some case."""
    paged = case.kind is AttentionKind.SOFTMAX
    return {
        "placement": case.placement if paged else "",
        "scratch": case.scratch,
        "group": case.heads.group,
        "context": paged and max(case.prefix_lens, default=0) >= 1000,
        "draft": case.draft_kind,
        "gain": case.gain,
        "state": case.state_scale,
        "requests": min(case.batch_size, 2),
        "cache": (case.forward, case.kv_dtype),
        "spare": case.spare_pages > 0,
        **(_state_values(case) if case.kind is not AttentionKind.SOFTMAX else {}),
    }


def _state_values(case: Case) -> dict[str, object]:
    """What kernels of a recurrent state branch on: how many requests, heads and tokens, whole blocks, snapshots, what the requests do
    next."""
    mean = -(-case.num_tokens // max(1, case.batch_size))
    turns = frozenset(turn.action for turn in parse_story(case.story))
    return {
        "crowd": sum(case.batch_size >= bound for bound in (1, 3, 129)),
        "heads": case.heads.q & (case.heads.q - 1) == 0,
        "tokens": sum(case.num_tokens >= bound for bound in (33, 2048)),
        "blocks": (min(case.batch_size, 2), mean > 0 and mean % 32 == 0, all(new % 32 == 0 for new in case.new_lens)),
        **_snapshot_values(case),
        "tokens per request": min(3, mean),
        "story": turns,
        "held": (case.forward, case.state_dtype),
        "shard": case.shard != (0, 1),
        "dim": (case.forward, case.heads.dim),
    }


def _snapshot_values(case: Case) -> dict[str, object]:
    """Whether some snapshot is none, the final state, at a multiple of 32 tokens, elsewhere."""
    if not case.track_lens:
        return {}
    pairs = list(zip(case.track_lens, case.new_lens, strict=True))
    inner = [track for track, new in pairs if 0 < track < new]
    return {
        "snapshot": case.forward,
        "no snapshot": 0 in case.track_lens,
        "snapshot at the end": any(track == new for track, new in pairs),
        "snapshot at a block": any(track % 32 == 0 for track in inner),
        "snapshot elsewhere": any(track % 32 for track in inner),
    }


@cache
def pairwise_subset(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Cases that still meet every pair of axis values (and every single value) that ``cases`` meet."""
    return _cover(cases, lambda case: frozenset(combinations(sorted(axis_values(case).items()), 2)) | _singles(single_values(case)))


@cache
def single_subset(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Cases that still meet every single axis value that ``cases`` meet."""
    return _cover(cases, lambda case: _singles({**axis_values(case), **runner_values(case)}) | _singles(single_values(case)))


def runner_values(case: Case) -> dict[str, object]:
    """What a runner can get wrong; everything else is the kernel's own affair, which eager cells cover."""
    paged = case.kind is AttentionKind.SOFTMAX
    return {
        "forward": case.forward,
        "without tokens": 0 in case.new_lens,
        "without prefix": 0 in case.prefix_lens,
        "one token each": set(case.new_lens) == {1},
        "one length": len(set(case.new_lens)) == 1,
        "trees": bool(case.trees),
        "draft": case.draft_kind,
        "requests": min(case.batch_size, 2),
        "scratch": case.scratch if paged else "",
        "placement": case.placement if paged else "",
        "window": case.window is not None,
        "cache": (case.forward, case.kv_dtype),
        "long": paged and max(case.kv_lens, default=0) > 128,  # splits, which a graph may freeze
        "large pages": paged and case.page_size >= 64,
        "alibi": case.alibi,
    }


@cache
def runner_subset(cases: Sequence[Case], fewest: bool = False) -> tuple[Case, ...]:
    """Cases that still meet every single one of the :func:`runner_values` that ``cases`` meet. With ``fewest`` neither the kind of draft,
    the size of pages, ALiBi nor whether an extend batch is called mixed counts: a runner does the same with them."""

    def wants(case: Case) -> frozenset[Pair]:
        values = runner_values(case)
        if fewest:
            del values["draft"], values["large pages"], values["alibi"]
            values["forward"] = ForwardMode.EXTEND if case.forward is ForwardMode.MIXED else case.forward
        return _singles(values)

    return _cover(cases, wants)


@cache
def work(case: Case) -> int:
    """What a case costs, roughly: new tokens times keys times the width of the heads, and what a pool is enlarged by. A recurrent state costs
    the same whatever lies behind it; of a story every batch counts."""
    if case.kind is not AttentionKind.SOFTMAX:
        tokens = sum(step.case.num_tokens + step.case.batch_size for step in story_steps(case))
        return tokens * STATE_WORK * case.heads.q * case.heads.dim
    longest = max(case.kv_lens, default=0)
    filled = case.spare_pages * case.page_size * case.heads.kv * case.heads.dim
    return (case.num_tokens + case.batch_size) * (longest + 64) * case.heads.q * case.heads.dim + filled


def _singles(values: dict[str, object]) -> frozenset[Pair]:
    return frozenset((value, value) for value in values.items())


def _cover(cases: Sequence[Case], wants: Callable[[Case], frozenset[Pair]]) -> tuple[Case, ...]:
    """Greedy cover: the case first that meets most of what is still uncovered for its work (and the cost of any case)."""
    wanted, costs = {case: wants(case) for case in cases}, {case: work(case) + SOME_WORK for case in cases}
    uncovered = frozenset().union(*wanted.values()) if wanted else frozenset()
    chosen: list[Case] = []
    left = list(cases)
    while uncovered:
        best = max(left, key=lambda case: len(wanted[case] & uncovered) / costs[case])
        chosen.append(best)
        left.remove(best)
        uncovered -= wanted[best]
    return tuple(case for case in cases if case in chosen)
