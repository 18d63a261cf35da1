"""A small subset of a suite that still meets every pair of axis values the suite meets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations

from attnmatrix.cases.case import Case

SOME_WORK = 200_000  # what a case costs besides, in units of ``work``
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


@cache
def pairwise_subset(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Cases that still meet every pair of axis values (and every single value) that ``cases`` meet."""
    return _cover(cases, lambda case: frozenset(combinations(sorted(axis_values(case).items()), 2)) | _singles(single_values(case)))


KERNEL_AXES = ("dim", "dtype", "group", "gain")
RUNNER_AXES = ("forward", "new", "prefix", "trees", "draft", "requests", "scratch")


@cache
def single_value_subset(cases: Sequence[Case], runner_only: bool = False) -> tuple[Case, ...]:
    """Cases that still meet every single value of every axis that ``cases`` meet, those apart that are the kernel's own affair, which eager
    cells cover. ``runner_only`` keeps just the axes that a runner around an eagerly called kernel can get wrong."""

    def wants(case: Case) -> frozenset[Pair]:
        values = {**axis_values(case), **single_values(case)}
        return _singles({k: v for k, v in values.items() if (k in RUNNER_AXES if runner_only else k not in KERNEL_AXES)})

    return _cover(cases, wants)


def work(case: Case) -> int:
    """What a case costs, roughly: new tokens times keys times the width of the heads."""
    longest = max(case.kv_lens, default=0)
    return (case.num_tokens + case.batch_size) * (longest + 64) * case.heads.q * case.heads.dim


def _singles(values: dict[str, object]) -> frozenset[Pair]:
    return frozenset((value, value) for value in values.items())


def _cover(cases: Sequence[Case], wants: Callable[[Case], frozenset[Pair]]) -> tuple[Case, ...]:
    """Greedy cover: the case first that meets most of what is still uncovered for its work (and the cost of any case)."""
    wanted = {case: wants(case) for case in cases}
    uncovered = frozenset().union(*wanted.values()) if wanted else frozenset()
    chosen: list[Case] = []
    while uncovered:
        best = max(cases, key=lambda case: len(wanted[case] & uncovered) / (work(case) + SOME_WORK))
        chosen.append(best)
        uncovered -= wanted[best]
    return tuple(case for case in cases if case in chosen)
