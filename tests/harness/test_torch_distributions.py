"""A row that names no package needs torch, and Triton's refusals are its own where Triton is installed."""

from __future__ import annotations

import pytest

from attnmatrix.cases.case import AttentionKind
from attnmatrix.harness import registry
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.capabilities import Blocked
from attnmatrix.harness.context import Context
from attnmatrix.harness.refusal import why_not_a_refusal
from attnmatrix.harness.registry import Row, installed_version


def _never(context: Context) -> AttentionBackend:
    raise NotImplementedError


@pytest.mark.skipif(installed_version("triton") is None, reason="needs triton")
def test_what_tritons_compiler_refuses_counts_for_a_row_of_torch() -> None:
    import triton

    row = Row("compiled", AttentionKind.SOFTMAX, _never, source=__file__)
    with pytest.raises(TypeError) as caught:
        triton.next_power_of_2("x")
    assert why_not_a_refusal(caught.value, Blocked("no", "TypeError", "unsupported operand"), row) is None


def test_a_row_of_torch_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "installed_version", lambda name: None)
    assert Row("plain", AttentionKind.SOFTMAX, _never, source=__file__).distributions == ("torch",)
