"""Every reproduction shows what its row declares, away from the harness."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

from attnmatrix.harness.backends import torch_varlen
from attnmatrix.harness.hybrid import PairCapabilities
from attnmatrix.harness.registry import rows
from attnmatrix.matrix import findings

NAMES = tuple(module.name for module in pkgutil.iter_modules(findings.__path__))
DECLARED = {
    fault.finding: row
    for row in rows()
    if not isinstance(row.capabilities, PairCapabilities)
    for fault in row.capabilities.known_faults  # type: ignore[attr-defined]
}
SAME, OTHER = 5e-3, 0.3
"""Relative errors: equal but for the arithmetic of the machine (TF32 on a GPU), and plainly something else."""
SHOWN = {
    "conch_causal_mask_ignores_prefix": ("top-left", "right"),
    "conch_decode_page_offset_in_32_bits": ("first", "last"),
    "fa2_one_token_beside_none_raises": ("alone", "beside a request without tokens"),
    "flashinfer_alibi_shifts_lse": ("slope times prefix larger", "right"),
    "flashinfer_cuda_core_decode_of_head_dim_192": ("sums of 16 threads", "right"),
    "flashinfer_fa2_head_dim_80_is_read_to_64": ("columns 64 to 79 as they were", "right"),
    "flashinfer_fa3_leaves_alibi_out": ("no bias", "right"),
    "flashinfer_minus_infinity_is_50000": ("mean of what is masked", "right"),
    "flashinfer_xqa_reads_strided_queries_as_contiguous": ("read as contiguous", "right"),
    "flashinfer_xqa_verify_has_no_window": ("no window", "right"),
    "seg_la_decode_of_head_dim_192_drops_keys": ("state key rows 0 to 127", "state key rows 128 to 191"),
    "seg_la_long_prefill_of_three_heads_raises": ("the state after all tokens", "the state before the call"),
    "seg_la_snapshot_inside_a_block_is_not_taken": ("what the slot held, after 33 tokens", "the state after 33 tokens"),
    "seg_la_snapshot_of_single_tokens_is_not_taken": (
        "what the snapshot's slot held before",
        "the state after the token, in the snapshot's slot",
    ),
    "seg_la_head_dim_96_leaves_columns_unwritten": ("state columns 0 to 63", "state columns 64 to 95"),
    "seg_la_one_token_extend_reads_stale_state": ("a start from the stale state", "a start from zero"),
    "seg_la_ragged_verify_reads_other_requests": ("lengths (2, 2)", "lengths (1, 3)"),
    "seg_la_uneven_lengths_take_decode_kernel": ("one token per request", "two tokens of request 0"),
    "seg_la_verify_ignores_tree_mask": ("a chain", "two siblings"),
    "seg_la_verify_of_one_draft_updates_live_state": (
        "the state after the draft token, in the live slot",
        "the state after the draft token, in caches",
    ),
    "sgl_triton_window_counts_draft_index": ("by index", "by depth"),
    "sgl_triton_window_of_one_key_is_none": ("every earlier key", "the own key"),
    "torch_varlen_splits_mix_requests": ("one split", "right"),
}
WIDE = ("conch_decode_page_offset_in_32_bits",)
"""Those whose pools a GPU alone holds, at a size at which they differ."""


def test_each_finding_is_declared_by_a_row_and_reproduced_here() -> None:
    assert set(NAMES) == set(DECLARED) == set(SHOWN)


@pytest.mark.parametrize("name", NAMES)
def test_finding_reproduces(name: str) -> None:
    if DECLARED[name].missing:
        pytest.skip(f"{', '.join(DECLARED[name].missing)} not installed")
    if (name in WIDE or "cpu" not in DECLARED[name].devices) and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if name == "torch_varlen_splits_mix_requests" and torch_varlen._lacks("block_table"):
        pytest.skip("this torch takes no page table")
    errors = importlib.import_module(f"attnmatrix.matrix.findings.{name}").main()
    explained, right = SHOWN[name]
    assert errors[explained] < SAME
    assert errors[right] > OTHER
