"""Batches over a KV cache in fp8 with scales that are not 1."""

from __future__ import annotations

from attnmatrix.cases.case import AttentionKind, Case, Heads, Scratch
from attnmatrix.cases.layouts import decode, extend
from attnmatrix.cases.speculative import SIBLINGS, verify

SOFTMAX, FP8 = AttentionKind.SOFTMAX, {"kv_dtype": "fp8e4m3"}
HALF = {"dtype": "fp16", "heads": Heads(8, 2, 64), **FP8}


def fp8_batches() -> tuple[Case, ...]:
    """Extend, mixed and decode over pages of 1, 16, 64 and 256; both 16-bit dtypes, head dims 64 and 128, GQA and none."""
    return (
        extend(16, (0, 20, 33), (18, 7, 1), SOFTMAX, name="fp8_extend", **FP8),
        decode(16, (5, 17, 64), SOFTMAX, name="fp8_decode", **FP8),
        extend(16, (0, 0), (18, 7), SOFTMAX, name="fp8_prompts", **FP8),
        extend(1, (9, 5), (6, 3), SOFTMAX, scratch=Scratch.FIRST, name="fp8_page1_extend", **HALF),
        decode(1, (9, 0, 5), SOFTMAX, scratch=Scratch.FIRST, name="fp8_page1_decode", **HALF),
        extend(64, (63, 130), (3, 5), SOFTMAX, name="fp8_page64_extend", **HALF),
        decode(64, (63, 64, 130), SOFTMAX, heads=Heads(4, 4, 128), name="fp8_page64_decode", **FP8),
        extend(256, (255, 0), (3, 2), SOFTMAX, name="fp8_page256_extend", **FP8),
        decode(256, (255, 256), SOFTMAX, name="fp8_page256_decode", **FP8),
        extend(16, (0, 20), (18, 7), SOFTMAX, soft_cap=5.0, gain=4.0, name="fp8_soft_cap_extend", **FP8),
    )


def fp8_verifies() -> tuple[Case, ...]:
    """Draft chains over pages of 1, 16 and 64, and a tree."""
    return (
        verify(16, (14, 31), 4, SOFTMAX, draft_kind="eagle", name="fp8_chain", **FP8),
        verify(1, (7, 9), 3, SOFTMAX, name="fp8_page1_chain", **HALF),
        verify(64, (62, 130), 3, SOFTMAX, name="fp8_page64_chain", **FP8),
        verify(16, (14, 31), 6, SOFTMAX, trees=(SIBLINGS,), draft_kind="eagle", name="fp8_tree", **FP8),
    )


def fp8_conversations() -> tuple[Case, ...]:
    """A prompt whose next steps read what was quantised before."""
    return (extend(16, (0, 20), (18, 7), SOFTMAX, name="fp8_handoff", **FP8),)
