"""A description that no engine could produce is refused, and the message names the problem and the case."""

from __future__ import annotations

import math

import pytest

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads, Placement

EXTEND = Case(ForwardMode.EXTEND, 16, (0, 8), (3, 3), Heads(4, 2, 128))
VERIFY = EXTEND.but(forward=ForwardMode.TARGET_VERIFY)
LINEAR = EXTEND.but(kind=AttentionKind.LIGHTNING)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (EXTEND, {"new_lens": (3,)}, "2 prefix lengths but 1 new lengths"),
        (EXTEND, {"prefix_lens": (0, -1)}, "lengths must be >= 0"),
        (EXTEND, {"new_lens": (-1, 3)}, "lengths must be >= 0"),
        (EXTEND, {"page_size": 0}, "page size must be >= 1"),
        (EXTEND, {"heads": Heads(4, 3, 128)}, "multiple of key/value heads, got h4x3x128"),
        (EXTEND, {"heads": Heads(4, 0, 128)}, "multiple of key/value heads"),
        (EXTEND, {"heads": Heads(2, 4, 128)}, "multiple of key/value heads"),
        (EXTEND, {"heads": Heads(4, 2, 0)}, "got h4x2x0"),
        (EXTEND, {"dtype": "f16"}, "unknown dtype 'f16'; known: bf16, fp16, fp32"),
        (EXTEND, {"kv_dtype": "int8"}, "unknown KV dtype 'int8'; known: fp8e4m3"),
        (EXTEND, {"draft_kind": "medusa"}, "unknown draft kind 'medusa'; known: eagle, frozen_kv_mtp, dflash, ngram"),
        (EXTEND, {"window": 0}, "a window holds at least the query's own key"),
        (EXTEND, {"window": 4, "window_layers": "last"}, "window_layers is 'all' or 'first', got 'last'"),
        (EXTEND, {"window_layers": "first"}, "needs a window"),
        (EXTEND, {"soft_cap": 0.0}, "soft cap must be positive and finite, got 0.0"),
        (EXTEND, {"soft_cap": math.inf}, "soft cap must be positive and finite"),
        (EXTEND, {"gain": math.nan}, "gain must be positive and finite, got nan"),
        (EXTEND, {"gain": -1.0}, "gain must be positive and finite"),
        (EXTEND, {"state_scale": 0.0}, "state scale must be positive and finite"),
        (EXTEND, {"seed": -1}, "seed must be >= 0, got -1"),
        (EXTEND, {"spare_pages": -1}, "spare pages must be >= 0, got -1"),
        (EXTEND, {"spare_pages": 2, "placement": Placement.CONTIGUOUS}, "a contiguous pool has no spare pages"),
        (LINEAR, {"spare_pages": 2}, "lightning attention has no spare pages"),
        (EXTEND, {"score_drop": -1.0}, "score drop must be >= 0 and finite, got -1.0"),
        (LINEAR, {"score_drop": 2.0}, "lightning attention has no score drop"),
        (EXTEND, {"forward": ForwardMode.IDLE}, "an idle batch has no requests"),
        (EXTEND, {"forward": ForwardMode.DECODE}, "decode computes exactly one new token"),
        (EXTEND, {"trees": ((-1, 0, 0),)}, "trees belong to target_verify"),
        (VERIFY, {"trees": ((-1, 0, 0),) * 3}, "3 trees for 2 requests"),
        (VERIFY, {"trees": ((-1, 0),)}, "tree of 2 nodes for 3 draft tokens of request 0"),
        (VERIFY, {"trees": ((-1, 0, 1), (-1, 0))}, "tree of 2 nodes for 3 draft tokens of request 1"),
        (VERIFY, {"trees": ((-1, 1, 0),)}, "parent must come before it"),
        (VERIFY, {"trees": ((-1, -2, 0),)}, "parent must come before it"),
        (LINEAR, {"window": 4, "sinks": True}, "lightning attention has no window, sinks"),
        (LINEAR, {"soft_cap": 5.0}, "lightning attention has no soft cap"),
        (LINEAR, {"alibi": True}, "lightning attention has no ALiBi"),
        (LINEAR, {"kv_dtype": "fp8e4m3"}, "lightning attention has no KV dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(case: Case, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=r"^case ") as caught:
        case.but(**change)
    assert message in str(caught.value)


def test_the_message_holds_the_id() -> None:
    with pytest.raises(ValueError, match=r"^case extend-p0-prefix0\.8-new3\.3-h4x2x128-bf16-shuffled: page size"):
        EXTEND.but(page_size=0)


@pytest.mark.parametrize(
    "change",
    [
        {"new_lens": (0, 0)},
        {"prefix_lens": (), "new_lens": ()},
        {"forward": ForwardMode.IDLE, "prefix_lens": (), "new_lens": ()},
        {"forward": ForwardMode.TARGET_VERIFY, "trees": ((-1, -1, -1),)},
        {"forward": ForwardMode.TARGET_VERIFY, "new_lens": (3, 0), "trees": ((-1, 0, 0), ())},
        {"window": 1},
    ],
    ids=str,
)
def test_borderline_cases_are_accepted(change: dict[str, object]) -> None:
    EXTEND.but(**change)
