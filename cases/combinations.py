"""Options in company: every two of them on some batch of each kind, met with every page size, dtype, head dim and group in turn.

What a row gets right option by option it may still get wrong in combination: another kernel is chosen, an argument is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import combinations

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads, Placement, Scratch
from attnmatrix.cases.layouts import decode, extend
from attnmatrix.cases.speculative import SIBLINGS

SOFTMAX, LIGHTNING = AttentionKind.SOFTMAX, AttentionKind.LIGHTNING

Values = Mapping[str, object]
SOFTMAX_OPTIONS: dict[str, Values] = {
    "window": {"window": 12},
    "cap": {"soft_cap": 8.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "fp8": {"kv_dtype": "fp8e4m3"},
    "strided": {"strided": True},
    "low": {"score_drop": 200.0},
}
APART = (("cap", "alibi"), ("cap", "low"))
"""Not tried together. Packages disagree on whether the soft cap or ALiBi comes first, and no released model has both; low scores are all capped
to the same."""
LIGHTNING_OPTIONS: dict[str, Values] = {
    "held": {"state_dtype": "bf16"},
    "strided": {"strided": True},
    "shard": {"shard": (1, 3)},
    "unit": {"state_scale": 1.0},
    "loud": {"gain": 4.0},
}
SHAPES = {
    "one": (1, 1, 64), "gqa4": (2, 4, 128), "mqa8": (1, 8, 128), "gqa3": (2, 3, 64), "dim96": (2, 2, 96), "gqa7": (1, 7, 80),
    "dim256": (2, 1, 256), "two": (2, 1, 128), "four": (4, 1, 64), "three": (3, 1, 128), "dim96one": (1, 1, 96), "eight": (8, 1, 64),
}  # fmt: skip
"""Key heads, query heads per key head, head dim."""
SOFTMAX_AXES: dict[str, tuple[object, ...]] = {
    "page_size": (16, 64, 1, 128, 32, 256),
    "dtype": ("bf16", "fp16", "fp32"),
    "shape": ("one", "gqa4", "mqa8", "gqa3", "dim96", "gqa7", "dim256"),
    "scratch": (Scratch.LAST, Scratch.FIRST),
    "placement": (Placement.SHUFFLED, Placement.INTERLEAVED, Placement.SCATTERED),
    "lens": (0, 1, 2, 3),
}
LIGHTNING_AXES: dict[str, tuple[object, ...]] = {
    "dtype": ("bf16", "fp16", "fp32"),
    "shape": ("two", "four", "three", "dim96one", "eight"),
    "lens": (0, 1, 2, 3),
}
EXTENDS = (((0, 37), (18, 3)), ((20, 5, 0), (1, 33, 2)), ((70,), (17,)), ((1, 40, 3, 0), (2, 1, 1, 9)))
DECODES = ((40, 6), (13,), (2, 31, 64), (90, 1, 15, 17, 5))
VERIFIES: tuple[tuple[tuple[int, ...], int], ...] = (((30, 7), 4), ((17,), 6), ((64, 15, 1), 3), ((40, 12), 20))


@cache
def extend_combinations(kind: AttentionKind) -> tuple[Case, ...]:
    """Two options each, in an extend or a mixed batch."""

    def build(lens: int, options: dict[str, object]) -> Case:
        prefix, new = EXTENDS[lens]
        forward = ForwardMode.MIXED if lens % 2 else ForwardMode.EXTEND
        return extend(prefix=prefix, new=new, kind=kind, forward=forward, **options)  # type: ignore[arg-type]

    return tuple(_combined(kind, "extend", build))


@cache
def decode_combinations(kind: AttentionKind) -> tuple[Case, ...]:
    """Two options each, in a decode batch."""
    return tuple(_combined(kind, "decode", lambda lens, options: decode(prefix=DECODES[lens], kind=kind, **options)))  # type: ignore[arg-type]


@cache
def verify_combinations(kind: AttentionKind) -> tuple[Case, ...]:
    """Two options each, in a verify batch: chains of up to 20 draft tokens and a tree."""

    def build(lens: int, options: dict[str, object]) -> Case:
        prefix, drafts = VERIFIES[lens]
        tree = {"trees": (SIBLINGS,), "draft_kind": "eagle"} if drafts == len(SIBLINGS) and kind is SOFTMAX else {}
        new = (drafts,) * len(prefix)
        return extend(prefix=prefix, new=new, kind=kind, forward=ForwardMode.TARGET_VERIFY, **tree, **options)  # type: ignore[arg-type]

    return tuple(_combined(kind, "verify", build))


def extremes() -> tuple[Case, ...]:
    """Sizes that no other batch has: pages past what 16-bit slot numbers hold, 33 requests, scores far below any finite mask."""
    small = Heads(2, 1, 64)
    return (
        extend(16, (40, 0, 75), (5, 20, 1), SOFTMAX, heads=small, spare_pages=5000, name="wide_pool_extend"),
        decode(1, (30, 7, 64), SOFTMAX, heads=small, spare_pages=70_000, name="wide_pool_decode"),
        extend(16, tuple(range(33)), (1, 2, 3) * 11, SOFTMAX, heads=small, name="requests33_extend"),
        decode(16, tuple(range(2, 35)), SOFTMAX, heads=small, name="requests33_decode"),
        extend(16, (0, 37), (18, 3), SOFTMAX, score_drop=12_000.0, name="deep_scores_extend"),
        decode(16, (40, 6), SOFTMAX, score_drop=12_000.0, name="deep_scores_decode"),
    )


def shared_prefixes() -> tuple[Case, ...]:
    """Requests that decode behind a common prefix in the same physical pages."""
    return (
        decode(16, (48, 48, 40, 5), SOFTMAX, heads=Heads(2, 1, 64), placement=Placement.SHARED, name="shared_decode"),
        decode(
            1, (9, 9, 12), SOFTMAX, heads=Heads(2, 1, 64), placement=Placement.SHARED, scratch=Scratch.FIRST, name="shared_page1_decode"
        ),
    )


def captured_options() -> tuple[Case, ...]:
    """Two or three options in decode, small enough for graphs on a CPU; the widest group, a window that no byte holds, a length of 1,024."""
    small: dict[str, object] = {"kind": SOFTMAX, "heads": Heads(2, 1, 64)}
    return (
        decode(16, (40, 6), window=12, soft_cap=8.0, name="window_cap_small_decode", **small),  # type: ignore[arg-type]
        decode(16, (5, 17), sinks=True, kv_dtype="fp8e4m3", name="sinks_fp8_small_decode", **small),  # type: ignore[arg-type]
        decode(16, (40, 6), window=12, sinks=True, soft_cap=8.0, name="window_cap_sinks_decode", **small),  # type: ignore[arg-type]
        decode(16, (1023, 600), window=512, name="window512_decode", **small),  # type: ignore[arg-type]
        decode(16, (5, 32), SOFTMAX, heads=Heads(16, 1, 64), name="group16_decode"),
    )


def verify_extremes() -> tuple[Case, ...]:
    """A long prefix under many draft tokens, in a chain and in a tree of two branches; scores far below any finite mask; a common prefix, six
    requests, a soft cap under a tree."""
    shape: dict[str, object] = {"kind": SOFTMAX, "forward": ForwardMode.TARGET_VERIFY}
    branches = (-1, *range(15), 0, *range(16, 31))
    return (
        extend(64, (1500, 20), (24, 24), heads=Heads(4, 2, 64), name="chain_context1500", **shape),  # type: ignore[arg-type]
        extend(16, (40, 6), (4, 4), score_drop=12_000.0, name="deep_scores_chain", **shape),  # type: ignore[arg-type]
        extend(16, (48, 48, 40), (3,) * 3, placement=Placement.SHARED, heads=Heads(2, 1, 64), name="shared_chain", **shape),  # type: ignore[arg-type]
        extend(16, (9, 30, 4, 17, 33, 15), (2,) * 6, heads=Heads(2, 1, 64), name="chain_six_requests", **shape),  # type: ignore[arg-type]
        extend(
            16,
            (14, 31),
            (6, 6),
            trees=(SIBLINGS,),
            draft_kind="eagle",
            soft_cap=5.0,
            gain=4.0,
            heads=Heads(2, 1, 64),
            name="tree_soft_cap",
            **shape,  # type: ignore[arg-type]
        ),
        extend(16, (33, 5), (32, 32), trees=(branches,), draft_kind="eagle", name="tree_two_branches32", **shape),  # type: ignore[arg-type]
    )


def _combined(kind: AttentionKind, what: str, build: Callable[[int, dict[str, object]], Case]) -> Iterator[Case]:
    """A case for each two options; of each further axis the value that these options, and the values chosen before, have met least."""
    options, axes = (SOFTMAX_OPTIONS, SOFTMAX_AXES) if kind is SOFTMAX else (LIGHTNING_OPTIONS, LIGHTNING_AXES)
    met: Counter[object] = Counter()
    for pair in combinations(options, 2):
        chosen: dict[str, object] = {}
        for axis, values in axes.items():
            fitting = [value for value in values if not ("fp8" in pair and value == "fp32")]
            company: list[object] = [*pair, *chosen.items()]
            chosen[axis] = min(fitting, key=lambda value: (sum(met[other, axis, value] for other in company), met[axis, value]))
            met.update([(axis, chosen[axis]), *((other, axis, chosen[axis]) for other in company)])
        if pair in APART:
            continue
        keys, group, dim = SHAPES[chosen.pop("shape")]  # type: ignore[index]
        lens = chosen.pop("lens")
        chosen.setdefault("page_size", 16)
        given = {"page": chosen.pop("page_size"), "heads": Heads(keys * group, keys, dim), **chosen}
        for option in pair:
            given.update(options[option])
        yield build(lens, {**given, "name": f"{'_'.join(pair)}_{what}"})  # type: ignore[arg-type]
