"""Sizes and options at which kernels take another way, between those that the other layouts have: small heads, so that they cost little."""

from __future__ import annotations

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads
from attnmatrix.cases.layouts import decode, extend

SOFTMAX, SMALL = AttentionKind.SOFTMAX, Heads(2, 1, 64)


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
    """Batches of 16, 32 and 65 requests, whose last ones end a block or begin one; head groups and counts beyond 8; head dim 192; pages of 8
    and 512."""
    return (
        extend(16, tuple(range(16)), (3, 1) * 8, SOFTMAX, heads=SMALL, name="requests16_extend"),
        decode(16, tuple(range(5, 37)), SOFTMAX, heads=SMALL, name="requests32_decode"),
        decode(16, tuple(range(1, 66)), SOFTMAX, heads=SMALL, name="requests65_decode"),
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
    )


def verify_options() -> tuple[Case, ...]:
    """Three options at once over a draft chain, and a window that spans tiles."""
    shape: dict[str, object] = {"kind": SOFTMAX, "forward": ForwardMode.TARGET_VERIFY, "heads": SMALL}
    return (
        extend(16, (40, 6), (4, 4), window=12, soft_cap=8.0, sinks=True, name="window_cap_sinks_chain", **shape),  # type: ignore[arg-type]
        extend(16, (300, 20), (5, 5), window=256, name="window256_chain", **shape),  # type: ignore[arg-type]
    )
