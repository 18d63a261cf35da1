"""Speculative batches: draft chains and trees verified against a cached prefix."""

from __future__ import annotations

from collections.abc import Iterable

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads
from attnmatrix.cases.layouts import extend, other_shape
from attnmatrix.cases.options import DRAFT_KINDS, Tree

SIBLINGS: Tree = (-1, 0, 0, 1, 1, 2)
"""Two children of the root, then three grandchildren: siblings at both depths."""
TWO_ROOTS: Tree = (-1, -1, 0, 1, 2)
"""Two branches that share nothing but the prefix."""


def verify(page: int, prefix: Iterable[int], drafts: int, kind: AttentionKind, **options: object) -> Case:
    """A target_verify batch: ``drafts`` tokens per request after the cached prefix."""
    prefix = tuple(prefix)
    return extend(page, prefix, (drafts,) * len(prefix), kind, forward=ForwardMode.TARGET_VERIFY, **options)


def verify_chains(kind: AttentionKind) -> tuple[Case, ...]:
    """Chains (topk 1) of 1 to 8 draft tokens over page edges, one per draft kind, ragged ones too."""
    shapes = (((14, 15, 16), 4), ((15,), 2), ((13, 30), 3), ((16, 29), 4))
    cases = [
        verify(16, prefix, drafts, kind, draft_kind=draft, name=f"chain_{draft}")
        for draft, (prefix, drafts) in zip(DRAFT_KINDS, shapes, strict=True)
    ]
    return (
        *cases,
        verify(1, (7, 9), 3, kind, name="chain_page1"),
        verify(32, (30, 66), 3, kind, name="chain_page32_fp16", **other_shape(kind)),
        verify(256, (255, 3), 3, kind, name="chain_page256_fp16", **other_shape(kind)),
        verify(16, (20,), 1, kind, name="chain_one_draft"),
        verify(16, (60, 3, 31), 8, kind, name="chain_eight_drafts"),
        extend(16, (18, 5, 40), (2, 5, 3), kind, forward=ForwardMode.TARGET_VERIFY, name="chain_ragged"),
    )


def verify_trees(kind: AttentionKind) -> tuple[Case, ...]:
    """Trees (topk > 1): siblings must not see each other; ragged trees make the mask rows differ in width."""
    return (
        verify(16, (14, 31), 6, kind, trees=(SIBLINGS,), draft_kind="eagle", name="tree_siblings"),
        verify(1, (9, 4), 5, kind, trees=(TWO_ROOTS,), draft_kind="eagle", name="tree_two_roots"),
        extend(
            16,
            (18, 5),
            (5, 2),
            kind,
            forward=ForwardMode.TARGET_VERIFY,
            trees=(TWO_ROOTS, (-1, -1)),
            draft_kind="eagle",
            name="tree_ragged",
        ),
    )


def verify_windows(window: int = 8) -> tuple[Case, ...]:
    """Windows in verify: the edge moves with each draft token's depth."""
    softmax = AttentionKind.SOFTMAX
    return (
        verify(16, (window - 2, window, 3 * window), 4, softmax, window=window, name=f"chain_window{window}"),
        verify(16, (3 * window, window - 1), 6, softmax, trees=(SIBLINGS,), window=window, name=f"tree_window{window}"),
    )


def verify_options() -> tuple[Case, ...]:
    """What plain batches meet, in verify: score options, a tree without prefix, a long prefix in another geometry."""
    softmax, tree = AttentionKind.SOFTMAX, {"trees": (SIBLINGS,), "draft_kind": "eagle"}
    return (
        verify(16, (20, 5), 4, softmax, sinks=True, name="chain_sinks"),
        verify(16, (20, 5), 6, softmax, alibi=True, name="tree_alibi", **tree),
        verify(16, (20, 5), 4, softmax, soft_cap=5.0, gain=4.0, name="chain_soft_cap"),
        verify(16, (0, 17), 6, softmax, name="tree_no_prefix", **tree),
        verify(256, (254, 300), 4, softmax, name="chain_page256"),
        verify(64, (700, 130), 5, softmax, heads=Heads(14, 2, 64), dtype="fp16", name="chain_context700"),
    )
