"""The value sets of a Case's options, and the text form of draft trees."""

from __future__ import annotations

DTYPES = ("bf16", "fp16", "fp32")
KV_DTYPES = ("fp8e4m3",)
KV_SCALES = ((0.37, 1.9), (0.0083, 1.3))
"""Scales of the keys and of the values in a quantised KV cache, of even and of odd layers: none is 1, no two are equal, and the keys of odd
layers reach the largest value of fp8."""
DRAFT_KINDS = ("eagle", "frozen_kv_mtp", "dflash", "ngram")

Tree = tuple[int, ...]
"""Parent of each draft token, by index within its request; -1 hangs below the last cached token."""


def format_trees(trees: tuple[Tree, ...]) -> str:
    """``((-1, 0, 0), (-1,))`` becomes ``r.0.0_r``."""
    return "_".join(".".join("r" if parent < 0 else str(parent) for parent in tree) for tree in trees)


def parse_trees(text: str) -> tuple[Tree, ...]:
    """Inverse of :func:`format_trees`. Raises ValueError for anything else."""
    return tuple(tuple(-1 if part == "r" else int(part) for part in tree.split(".")) if tree else () for tree in text.split("_"))
