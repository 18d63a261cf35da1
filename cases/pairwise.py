"""A small subset of a suite that still meets every pair of axis values the suite meets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

from attnmatrix.cases.case import Case

Pair = tuple[tuple[str, object], tuple[str, object]]


def axis_values(case: Case) -> dict[str, object]:
    """The axes a subset must keep covering, two at a time."""
    prefixes, news = case.prefix_lens, case.new_lens
    return {
        "forward": case.forward,
        "page": case.page_size,
        "dtype": case.dtype,
        "dim": case.heads.dim,
        "prefix": (0 in prefixes, any(prefixes)),
        "new": (0 in news, news.count(1) == len(news), len(set(news)) == 1),
        "options": (case.window, case.soft_cap, case.sinks, case.alibi, case.strided),
        "trees": bool(case.trees),
    }


def single_values(case: Case) -> dict[str, object]:
    """The axes of which each value must stay, on some case."""
    return {
        "placement": case.placement,
        "scratch": case.scratch,
        "group": case.heads.group,
        "context": max(case.prefix_lens, default=0) >= 1000,
        "draft": case.draft_kind,
        "gain": case.gain,
        "state": case.state_scale,
        "requests": min(case.batch_size, 2),
    }


def _pairs(case: Case) -> frozenset[Pair]:
    singles = frozenset((value, value) for value in single_values(case).items())
    return frozenset(combinations(sorted(axis_values(case).items()), 2)) | singles


@cache
def pairwise_subset(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Greedy cover in suite order, the case with most uncovered pairs (and single values) first."""
    wanted = {case: _pairs(case) for case in cases}
    open_pairs = frozenset().union(*wanted.values()) if wanted else frozenset()
    chosen: list[Case] = []
    while open_pairs:
        best = max(cases, key=lambda case: len(wanted[case] & open_pairs))
        chosen.append(best)
        open_pairs -= wanted[best]
    return tuple(case for case in cases if case in chosen)
