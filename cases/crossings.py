"""Options, head groups and counts where contexts are longer than one split of keys: what two ways of a kernel do to each other."""

from __future__ import annotations

from attnmatrix.cases.case import AttentionKind, Case, Heads
from attnmatrix.cases.layouts import decode, extend
from attnmatrix.cases.quantised import FP8
from attnmatrix.cases.speculative import SIBLINGS, verify
from attnmatrix.cases.thresholds import FORTY, SMALL

SOFTMAX = AttentionKind.SOFTMAX


def beyond_a_split() -> tuple[Case, ...]:
    """More than 512 keys beside sinks, a large soft cap, ALiBi, an fp8 cache under a window, head groups of 4 and 8 and ten requests; a later
    chunk of more than 512 new tokens."""
    return (
        decode(16, (700, 40), SOFTMAX, heads=SMALL, sinks=True, name="sinks_context700_decode"),
        decode(16, (700, 40), SOFTMAX, heads=SMALL, window=600, soft_cap=30.0, name="cap30_context700_decode"),
        decode(16, (700, 40), SOFTMAX, heads=SMALL, window=600, name="fp8_context700_decode", **FP8),
        decode(16, (1100, 40), SOFTMAX, heads=Heads(2, 1, 128), alibi=True, name="alibi_context1100_decode"),
        decode(16, (700, 40), SOFTMAX, heads=Heads(4, 1, 64), name="group4_context700_decode"),
        decode(16, (700, 40), SOFTMAX, heads=Heads(8, 1, 64), name="group8_context700_decode"),
        decode(16, (700, *range(3, 12)), SOFTMAX, heads=SMALL, name="requests10_context700_decode"),
        extend(16, (600,), (600,), SOFTMAX, heads=SMALL, name="chunk600_behind_600_extend"),
    )


def heads_and_pages() -> tuple[Case, ...]:
    """Groups of 16 in a prompt and 32 in a decode, five and twenty key heads, as tensor parallelism leaves them, and pages of 4."""
    return (
        extend(16, (0, 20), (18, 3), SOFTMAX, heads=Heads(16, 1, 64), name="group16_extend"),
        decode(16, (5, 32), SOFTMAX, heads=Heads(32, 1, 64), name="group32_decode"),
        extend(16, (0, 20), (18, 3), SOFTMAX, heads=Heads(10, 5, 64), name="kv_heads5_extend"),
        decode(16, (5, 32), SOFTMAX, heads=Heads(20, 20, 64), name="kv_heads20_decode"),
        decode(4, (3, 4, 30), SOFTMAX, heads=SMALL, name="page4_decode"),
    )


def captured() -> tuple[Case, ...]:
    """A decode batch of more requests than 48."""
    return (decode(16, tuple(range(4, 54)), SOFTMAX, heads=SMALL, name="requests50_decode"),)


def drafts() -> tuple[Case, ...]:
    """A tree and a chain with sinks behind more than one split, a window between the depth of a tree and its number of nodes, groups of 5 and
    16 (144 rows of queries over one key head), and 40 requests."""
    return (
        verify(16, (600, 20), 6, SOFTMAX, heads=SMALL, trees=(SIBLINGS,), draft_kind="eagle", name="tree_behind_600"),
        verify(16, (300, 20), 4, SOFTMAX, heads=SMALL, sinks=True, name="sinks_behind_300_chain"),
        verify(32, (14, 31), 40, SOFTMAX, heads=SMALL, trees=(FORTY,), draft_kind="eagle", window=20, name="tree_window20"),
        verify(16, (40, 6), 3, SOFTMAX, heads=Heads(5, 1, 64), name="group5_chain"),
        verify(16, (40, 6), 9, SOFTMAX, heads=Heads(16, 1, 64), name="group16_chain"),
        verify(16, tuple(range(3, 43)), 2, SOFTMAX, heads=SMALL, name="requests40_chain"),
    )
