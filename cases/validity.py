"""Why a description is no case: the rules that every Case meets."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from attnmatrix.cases.options import DRAFT_KINDS, DTYPES, KV_DTYPES
from attnmatrix.cases.story import goes_on, story_problem

if TYPE_CHECKING:
    from attnmatrix.cases.case import Case

MOST_REQUESTS = 4096
MOST_TURNS = 100_000  # of a story, by any of its numbers
MOST_WINDOW = 2**31 - 1  # kernels count keys in int32
MOST_ELEMENTS = 2**27
"""Of one tensor of a case: a layer's keys, one request's scores, the queries, the states. The suites stay below a tenth of it; more is
gigabytes, since the judgement holds several such tensors, in float64."""


def problem_of(case: Case) -> str | None:
    """The first rule that ``case`` breaks, in words; None for a valid case."""
    return (
        _shape_problem(case)
        or _size_problem(case)
        or _option_problem(case)
        or _kind_problem(case)
        or _forward_problem(case)
        or _state_problem(case)
    )


def _shape_problem(case: Case) -> str | None:
    prefix, new, heads = case.prefix_lens, case.new_lens, case.heads
    if len(prefix) != len(new):
        return f"{len(prefix)} prefix lengths but {len(new)} new lengths"
    if min((*prefix, *new), default=0) < 0:
        return "lengths must be >= 0"
    if case.page_size < 1:
        return "page size must be >= 1"
    if case.spare_pages < 0:
        return f"spare pages must be >= 0, got {case.spare_pages}"
    if case.spare_pages and case.placement == "contiguous":
        return "a contiguous pool has no spare pages"
    if min(heads.q, heads.kv, heads.dim) < 1 or heads.q % heads.kv:
        return f"query heads must be a positive multiple of key/value heads, got {heads}"
    return None


def _size_problem(case: Case) -> str | None:
    """What no machine should be asked to allocate."""
    if case.batch_size > MOST_REQUESTS:
        return f"{case.batch_size} requests, at most {MOST_REQUESTS} are tried"
    if any(len(digits) > 9 or int(digits) > MOST_TURNS for digits in re.findall(r"\d+", case.story)):
        return f"a number of the story is larger than {MOST_TURNS}"
    if (case.window or 0) > MOST_WINDOW:
        return f"a window is at most {MOST_WINDOW}, got {case.window}"
    heads, page, softmax = case.heads, case.page_size, case.kind == "softmax"
    stored = sum(-(-total // page) * page for total in case.kv_lens) or page
    for what, elements in (
        ("keys", stored * heads.kv * heads.dim),
        ("scores", max((n * total for n, total in zip(case.new_lens, case.kv_lens, strict=True)), default=0) * heads.q if softmax else 0),
        ("queries", max(case.num_tokens, 1) * heads.q * heads.dim),
        ("slopes", heads.q * case.shard[1]),
        ("states", (case.batch_size or 1) * heads.q * heads.dim**2 if not softmax else 0),
    ):
        if elements > MOST_ELEMENTS:
            return f"{elements:,} elements of {what}, at most {MOST_ELEMENTS:,} are tried"
    return None


def _option_problem(case: Case) -> str | None:
    for label, value, known in (
        ("dtype", case.dtype, DTYPES),
        ("KV dtype", case.kv_dtype, (None, *KV_DTYPES)),
        ("state dtype", case.state_dtype, (None, *DTYPES)),
        ("draft kind", case.draft_kind, (None, *DRAFT_KINDS)),
    ):
        if value not in known:
            return f"unknown {label} {value!r}; known: {', '.join(name for name in known if name)}"
    if case.window is not None and case.window < 1:
        return "a window holds at least the query's own key"
    if case.window_layers not in ("all", "first"):
        return f"window_layers is 'all' or 'first', got {case.window_layers!r}"
    if case.window_layers == "first" and case.window is None:
        return "window_layers 'first' needs a window"
    for label, number in (("soft cap", case.soft_cap), ("gain", case.gain), ("state scale", case.state_scale)):
        if number is not None and not 0 < number < math.inf:
            return f"{label} must be positive and finite, got {number}"
    if not 0 <= case.score_drop < math.inf:
        return f"score drop must be >= 0 and finite, got {case.score_drop}"
    return f"seed must be >= 0, got {case.seed}" if case.seed < 0 else None


def _kind_problem(case: Case) -> str | None:
    """Options of the scores and of the KV cache mean nothing to a kind that has neither."""
    if case.kind == "softmax":
        story = goes_on(case.story)
        states = {"state dtype": case.state_dtype, "snapshots": case.track_lens, "story": story, "shard": case.shard != (0, 1)}
        wrong = [label for label, value in states.items() if value]
        return f"softmax attention has no {', '.join(wrong)}" if wrong else None
    given = {"window": case.window, "soft cap": case.soft_cap, "sinks": case.sinks, "ALiBi": case.alibi, "KV dtype": case.kv_dtype}
    given.update({"spare pages": case.spare_pages, "score drop": case.score_drop})
    wrong = [label for label, value in given.items() if value]
    return f"{case.kind.value} attention has no {', '.join(wrong)}" if wrong else None


def _forward_problem(case: Case) -> str | None:
    new = case.new_lens
    if case.forward == "idle" and new:
        return "an idle batch has no requests"
    if case.forward == "decode" and set(new) - {1}:
        return "decode computes exactly one new token per request"
    if not case.trees:
        return None
    if case.forward != "target_verify":
        return "trees belong to target_verify"
    if len(case.trees) not in (1, len(new)):
        return f"{len(case.trees)} trees for {len(new)} requests"
    for request, length in enumerate(new):
        tree = case.tree(request)
        if len(tree) != length:
            return f"tree of {len(tree)} nodes for {length} draft tokens of request {request}"
        if any(not -1 <= parent < node for node, parent in enumerate(tree)):
            return "a tree node's parent must come before it (-1 for a root)"
    return None


def _state_problem(case: Case) -> str | None:
    """Snapshots, stories and shards of kinds with a recurrent state."""
    rank, ranks = case.shard
    if not 0 <= rank < ranks:
        return f"rank {rank} of {ranks}: a shard is (rank, ranks)"
    if case.track_lens:
        if case.forward not in ("extend", "mixed", "decode"):
            return "snapshots are taken in extend, mixed and decode batches"
        if len(case.track_lens) != len(case.new_lens):
            return f"{len(case.track_lens)} snapshot lengths for {len(case.new_lens)} requests"
        if any(not 0 <= track <= new for track, new in zip(case.track_lens, case.new_lens, strict=True)):
            return "a snapshot is taken after 0 (none) to all new tokens"
    if not case.story:
        return None
    if case.trees:
        return "a story accepts draft tokens of chains"
    verifies = case.forward == "target_verify"
    return story_problem(case.story, case.batch_size, verifies, case.track_lens, case.prefix_lens, case.new_lens)
