"""Batches of kinds with a recurrent state: snapshots, stories that one call cannot show, and sizes at which their kernels take another way."""

from __future__ import annotations

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads
from attnmatrix.cases.layouts import decode, extend
from attnmatrix.cases.speculative import verify

LIGHTNING = AttentionKind.LIGHTNING
SMALL = Heads(2, 2, 64)
NARROW = Heads(1, 1, 64)


def snapshots() -> tuple[Case, ...]:
    """Snapshots at multiples of a block, at the end, at every other length, and of some requests only; in decode."""
    return (
        extend(16, (0, 20, 33, 0), (70, 64, 40, 33), LIGHTNING, heads=SMALL, track_lens=(64, 32, 40, 0), name="snapshot_blocks"),
        extend(16, (16,), (96,), LIGHTNING, track_lens=(64,), heads=SMALL, name="snapshot_alone"),
        extend(16, (0, 33), (40, 50), LIGHTNING, track_lens=(32, 50), heads=SMALL, name="snapshot_pair"),
        extend(1, range(34), (34,) * 34, LIGHTNING, track_lens=tuple(range(1, 35)), heads=NARROW, name="snapshot_every_length"),
        extend(16, (0, 20, 33), (40, 7, 1), LIGHTNING, track_lens=(32, 7, 0), forward=ForwardMode.MIXED, name="snapshot_mixed"),
        extend(16, (20, 0), (1, 1), LIGHTNING, track_lens=(1, 1), name="snapshot_single_tokens"),
        decode(16, (14, 15, 16), LIGHTNING, track_lens=(1, 0, 1), name="snapshot_decode"),
    )


def extend_stories() -> tuple[Case, ...]:
    """Prefill in parts at every split point, prefill then decode, slots taken over, snapshots resumed, long rollouts."""
    parts = tuple(range(1, 33))
    rest = "x" + ".".join(str(33 - part) for part in parts)
    return (
        extend(16, (0,) * 32, parts, LIGHTNING, heads=NARROW, story=rest, name="story_every_split"),
        extend(16, (0, 20), (64, 100), LIGHTNING, heads=SMALL, story="x64.37_x5.70_x33.2", name="story_chunked_prefill"),
        extend(16, (0, 20), (18, 33), LIGHTNING, story="d3", name="story_prefill_decode"),
        extend(16, (20, 7), (5, 9), LIGHTNING, story="n12.3_d_n2_x3", name="story_slot_reused"),
        extend(16, (0, 20), (40, 70), LIGHTNING, heads=SMALL, track_lens=(32, 64), story="r5.3_x4", name="story_snapshot_resumed"),
        extend(
            16, (0,) * 5, (9,) * 5, LIGHTNING, heads=SMALL, track_lens=(1, 2, 5, 8, 9), story="r5_x2", name="story_any_snapshot_resumed"
        ),
        extend(16, (0,), (24,), LIGHTNING, heads=Heads(1, 1, 128), story="d1000", name="story_rollout_1000"),
        extend(16, (0, 5), (64, 64), LIGHTNING, heads=SMALL, story="x64t62_x3", name="story_rollout_4000"),
    )


def verify_stories() -> tuple[Case, ...]:
    """Verify, accept none, some or all of the draft tokens, and go on with or without drafts."""
    return (
        verify(16, (14, 15, 16, 31), 4, LIGHTNING, story="a0.2.4.1_d2", name="story_accept_some"),
        verify(16, (20, 5), 4, LIGHTNING, story="a2.3_v4_a0.4_d", name="story_verify_twice"),
        verify(16, (20, 9), 3, LIGHTNING, story="a3.0_x5.2_v2_a1.2_x3", name="story_verify_extend"),
        verify(16, (20, 9), 1, LIGHTNING, story="a1.0_d", name="story_one_draft"),
        extend(16, (18, 5, 40), (2, 5, 3), LIGHTNING, forward=ForwardMode.TARGET_VERIFY, story="a1.5.0_d", name="story_ragged_drafts"),
        verify(16, (30, 7), 4, LIGHTNING, heads=SMALL, story="_".join(["a2.3_v4"] * 24) + "_a4.1_x2", name="story_verify_rollout"),
    )


def kernel_branches() -> tuple[Case, ...]:
    """One request of whole blocks, more requests than a grid is tuned for, 2,048 tokens and more, wide heads, many heads, a slice of a
    model's heads, states in bfloat16."""
    return (
        extend(16, (40,), (64,), LIGHTNING, name="whole_blocks"),
        extend(16, (0,), (96,), LIGHTNING, heads=Heads(3, 3, 64), name="whole_blocks_no_prefix"),
        extend(16, (0, 9), (24, 40), LIGHTNING, heads=SMALL, name="whole_blocks_on_average"),
        extend(16, (5,), (70,), LIGHTNING, heads=Heads(2, 2, 32), name="one_key_split"),
        decode(16, range(3, 132), LIGHTNING, heads=Heads(1, 1, 128), name="many_requests_decode"),
        extend(16, (0,), (2050,), LIGHTNING, heads=NARROW, name="long_prefill"),
        extend(16, (0, 9), (5, 5), LIGHTNING, heads=SMALL, name="uniform_some_prefix"),
        extend(16, (7, 0), (1000, 1100), LIGHTNING, heads=Heads(3, 3, 64), name="long_prefill_three_heads"),
        extend(16, (0, 20), (5, 3), LIGHTNING, heads=Heads(1, 1, 192), name="wide_heads_extend"),
        decode(16, (5, 32), LIGHTNING, heads=Heads(2, 2, 192), name="wide_heads_decode"),
        decode(16, (5, 32), LIGHTNING, heads=Heads(2, 2, 256), name="widest_heads_decode"),
        extend(16, (0, 20), (5, 34), LIGHTNING, heads=Heads(1, 1, 256), name="widest_heads_extend"),
        extend(16, (0, 20), (40, 3), LIGHTNING, heads=Heads(6, 6, 64), shard=(1, 2), name="shard_extend"),
        decode(16, (20, 9), LIGHTNING, shard=(3, 4), name="shard_decode"),
        extend(16, (0, 20), (40, 3), LIGHTNING, state_dtype="bf16", name="bf16_states_extend"),
        decode(16, (20, 9, 40), LIGHTNING, state_dtype="bf16", name="bf16_states_decode"),
        extend(16, (20,), (5,), LIGHTNING, state_dtype="bf16", story="d8", name="bf16_states_story"),
    )


def verify_branches() -> tuple[Case, ...]:
    """Verify beside what plain chains meet: states in bfloat16, a slice of a model's heads, other head dims."""
    return (
        verify(16, (14, 31, 5), 4, LIGHTNING, state_dtype="bf16", name="bf16_states_verify"),
        verify(16, (14, 31), 3, LIGHTNING, heads=Heads(3, 3, 64), shard=(0, 2), name="shard_verify"),
        verify(16, (14, 31, 5), 5, LIGHTNING, heads=Heads(3, 3, 128), strided=True, name="strided_verify"),
    )
