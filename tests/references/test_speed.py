"""A reference call is cheap enough for every cell to make several."""

from __future__ import annotations

import time

import torch

from attnmatrix.cases.case import Case, ForwardMode, Heads
from attnmatrix.references.decayed_state import decayed_state_attention
from attnmatrix.references.softmax import softmax_attention
from attnmatrix.references.visibility import visible_keys

GENEROUS = 10.0  # seconds; well under 2 are expected, shared machines are slower


def test_softmax_over_a_thousand_tokens() -> None:
    case = Case(ForwardMode.EXTEND, 16, (0,), (1024,), Heads(8, 8, 128))
    q, k, v = (torch.randn(1024, 8, 128) for _ in range(3))
    begin = time.perf_counter()
    softmax_attention(q, k, v, visible_keys(case, 0, 0), 128**-0.5)
    seconds = time.perf_counter() - begin
    print(f"softmax, 1024 tokens, 8 heads, dim 128: {seconds:.2f} s")
    assert seconds < GENEROUS


def test_decayed_state_over_a_thousand_tokens() -> None:
    q, k, v = (torch.randn(1024, 8, 128) for _ in range(3))
    initial, slopes = torch.randn(1, 8, 128, 128), torch.full((8,), 0.01)
    begin = time.perf_counter()
    decayed_state_attention(q, k, v, initial, slopes, [1024], 128**-0.5)
    seconds = time.perf_counter() - begin
    print(f"decayed state, 1024 tokens, 8 heads, dim 128: {seconds:.2f} s")
    assert seconds < GENEROUS
