"""Sizes and options at which kernels take another way, between those that the other layouts have: small heads, so that they cost little."""

from __future__ import annotations

from attnmatrix.cases.case import AttentionKind, Case, Heads
from attnmatrix.cases.layouts import decode, extend
from attnmatrix.cases.options import Tree
from attnmatrix.cases.quantised import FP8
from attnmatrix.cases.speculative import SIBLINGS, verify

SOFTMAX, SMALL = AttentionKind.SOFTMAX, Heads(2, 1, 64)
DEEP_SIBLINGS: Tree = (-1, 0, 1, 2, 2, 3, 3)
"""A chain of three whose last has two children, and the first of them two more: siblings at depths 3 and 4 (the root's is 0)."""
FORTY: Tree = tuple((node - 1) // 2 for node in range(40))
"""A binary tree of more nodes than a word has bits."""
GPT_OSS_FP8: dict[str, object] = {"window": 12, "window_layers": "first", "sinks": True, **FP8}


def lengths_and_windows() -> tuple[Case, ...]:
    """Contexts between the powers of two at which splits change, a chunk of several query tiles, windows that span tiles, behind a prefix
    too."""
    oss = {"heads": Heads(16, 2, 64), "sinks": True, "window": 128, "window_layers": "first"}
    return (
        decode(16, (2500, 40), SOFTMAX, heads=SMALL, name="context2500_decode"),
        extend(16, (0,), (700,), SOFTMAX, heads=SMALL, name="chunk700_extend"),
        extend(16, (300, 0), (40, 3), SOFTMAX, heads=SMALL, window=256, name="window256_extend"),
        decode(16, (1500, 1023), SOFTMAX, heads=SMALL, window=1024, name="window1024_decode"),
        extend(16, (150, 0), (140, 3), SOFTMAX, name="gpt_oss_prefix_extend", **oss),
    )


def chunks() -> tuple[Case, ...]:
    """Long contexts over small pages, later chunks of a long prompt, numbers of keys and of new tokens at and beyond powers of two."""
    return (
        extend(1, (300, 0), (40, 3), SOFTMAX, heads=SMALL, name="page1_context300_extend"),
        decode(1, (1100, 256), SOFTMAX, heads=SMALL, name="page1_context1100_decode"),
        decode(32, (1500, 255), SOFTMAX, heads=SMALL, name="page32_context1500_decode"),
        extend(16, (600, 0), (70, 3), SOFTMAX, heads=SMALL, name="chunk_behind_600_extend"),
        extend(16, (2000,), (300,), SOFTMAX, heads=SMALL, name="chunk_behind_2000_extend"),
        decode(16, (2047, 4095), SOFTMAX, heads=SMALL, dtype="fp16", name="exact4096_decode"),
        extend(16, (1792,), (256,), SOFTMAX, heads=SMALL, dtype="fp16", name="exact2048_extend"),
        extend(16, (0,), (1100,), SOFTMAX, heads=SMALL, name="chunk1100_extend"),
        decode(16, (2600, 2047), SOFTMAX, heads=SMALL, window=2048, name="window2048_decode"),
        extend(16, (2100,), (20,), SOFTMAX, heads=SMALL, window=2048, name="window2048_extend"),
    )


def long_contexts() -> tuple[Case, ...]:
    """Long contexts in fp16, whose limit is near enough to see one key of thousands left out anywhere."""
    half: dict[str, object] = {"kind": SOFTMAX, "heads": SMALL, "dtype": "fp16"}
    return (
        decode(16, (2500, 40), name="context2500_fp16_decode", **half),  # type: ignore[arg-type]
        decode(16, (4007, 40), name="context4007_fp16_decode", **half),  # type: ignore[arg-type]
        extend(64, (4000, 130), (5, 9), name="context4000_fp16_extend", **half),  # type: ignore[arg-type]
        decode(64, (32000,), SOFTMAX, heads=Heads(8, 8, 64), dtype="fp16", name="context32000_fp16_decode"),
        extend(64, (32000,), (5,), name="context32000_fp16_extend", **half),  # type: ignore[arg-type]
    )


def counts() -> tuple[Case, ...]:
    """Batches of 16, 32, 65 and 100 requests, whose last ones end a block or begin one, and one without a new token; head groups between and
    beyond those of the other layouts, and more key heads; head dim 192; pages of 8 and 512."""
    return (
        extend(16, tuple(range(16)), (3, 1) * 8, SOFTMAX, heads=SMALL, name="requests16_extend"),
        decode(16, tuple(range(5, 37)), SOFTMAX, heads=SMALL, name="requests32_decode"),
        decode(16, tuple(range(1, 66)), SOFTMAX, heads=SMALL, name="requests65_decode"),
        extend(16, tuple(range(100)), (1, 2) * 50, SOFTMAX, heads=SMALL, name="requests100_extend"),
        decode(16, tuple(range(1, 101)), SOFTMAX, heads=SMALL, name="requests100_decode"),
        extend(16, (5, 20), (0, 0), SOFTMAX, heads=SMALL, name="no_new_tokens"),
        extend(16, (0, 20), (18, 3), SOFTMAX, heads=Heads(12, 2, 64), name="group6_extend"),
        decode(16, (5, 32), SOFTMAX, heads=Heads(12, 2, 64), name="group6_decode"),
        extend(16, (0, 20), (18, 3), SOFTMAX, heads=Heads(18, 2, 64), name="group9_extend"),
        decode(16, (5, 32), SOFTMAX, heads=Heads(18, 2, 64), name="group9_decode"),
        extend(16, (0, 20), (18, 3), SOFTMAX, heads=Heads(20, 2, 64), name="group10_extend"),
        decode(16, (5, 32), SOFTMAX, heads=Heads(20, 2, 64), name="group10_decode"),
        decode(16, (5, 32), SOFTMAX, heads=Heads(12, 1, 64), name="group12_decode"),
        extend(16, (0, 20), (18, 3), SOFTMAX, heads=Heads(32, 1, 64), name="group32_extend"),
        extend(16, (0, 20), (18, 3), SOFTMAX, heads=Heads(16, 16, 64), name="kv_heads16_extend"),
        decode(16, (5, 32), SOFTMAX, heads=Heads(16, 16, 64), name="kv_heads16_decode"),
        extend(16, (0, 20), (18, 3), SOFTMAX, heads=Heads(2, 1, 192), name="dim192_extend"),
        decode(16, (5, 32), SOFTMAX, heads=Heads(2, 1, 192), name="dim192_decode"),
        extend(8, (7, 0, 9), (2, 8, 1), SOFTMAX, heads=SMALL, name="page8_extend"),
        decode(8, (7, 8, 30), SOFTMAX, heads=SMALL, name="page8_decode"),
        decode(512, (511, 513, 3), SOFTMAX, heads=SMALL, name="page512_decode"),
    )


def loudest() -> tuple[Case, ...]:
    """Scores in the hundreds, and three options at once where a prompt meets them."""
    return (
        extend(16, (8, 16), (8, 1), SOFTMAX, heads=SMALL, gain=64.0, name="loudest_extend"),
        decode(16, (14, 40), SOFTMAX, heads=SMALL, gain=64.0, name="loudest_decode"),
        extend(16, (40, 6), (9, 1), SOFTMAX, heads=SMALL, window=12, soft_cap=8.0, sinks=True, name="window_cap_sinks_extend"),
        extend(16, (40, 6), (9, 1), SOFTMAX, heads=SMALL, name="window_sinks_fp8_extend", **GPT_OSS_FP8),
        decode(16, (40, 6), SOFTMAX, heads=SMALL, name="window_sinks_fp8_decode", **GPT_OSS_FP8),
    )


def captured() -> tuple[Case, ...]:
    """A decode batch whose graphs hold more than 16 and more than 32 requests."""
    return (decode(16, tuple(range(4, 24)), SOFTMAX, heads=SMALL, name="requests20_decode"),)


def verify_options() -> tuple[Case, ...]:
    """Three options at once over a draft chain and a tree, a window that spans tiles, more requests, deep siblings, and more draft tokens than a
    word of a mask has bits."""
    shape: dict[str, object] = {"kind": SOFTMAX, "heads": SMALL}
    tree = {**shape, "draft_kind": "eagle"}
    return (
        verify(16, (40, 6), 4, window=12, soft_cap=8.0, sinks=True, name="window_cap_sinks_chain", **shape),  # type: ignore[arg-type]
        verify(16, (300, 20), 5, window=256, name="window256_chain", **shape),  # type: ignore[arg-type]
        verify(16, (40, 6), 4, name="window_sinks_fp8_chain", **shape, **GPT_OSS_FP8),  # type: ignore[arg-type]
        verify(16, (40, 6), 6, trees=(SIBLINGS,), window=12, name="window_fp8_tree", **tree, **FP8),  # type: ignore[arg-type]
        verify(16, tuple(range(3, 15)), 3, name="requests12_chain", **shape),  # type: ignore[arg-type]
        verify(16, (14, 31), 7, trees=(DEEP_SIBLINGS,), name="tree_deep_siblings", **tree),  # type: ignore[arg-type]
        verify(16, (14, 31), 40, trees=(FORTY,), name="tree_forty", **tree),  # type: ignore[arg-type]
    )
