"""Memory that nobody wrote is NaN while a backend runs, so that an unwritten row cannot look right by luck."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnmatrix.harness.uninitialised import nan_in_new_tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_new_memory_is_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(3, 4, dtype=dtype)
    with nan_in_new_tensors():
        made = [
            torch.empty(3, 4, dtype=dtype),
            torch.empty_like(like),
            like.new_empty(3, 4),
            torch.empty_strided((3, 4), (4, 1), dtype=dtype),
        ]
    assert all(bool(tensor.isnan().all()) for tensor in made)


def test_new_integers_are_out_of_range() -> None:
    with nan_in_new_tensors():
        assert (torch.empty(5, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()


def test_what_is_written_stays() -> None:
    with nan_in_new_tensors():
        assert torch.equal(torch.zeros(3) + 1, torch.ones(3))


@pytest.mark.parametrize("before", [(False, False), (True, True)], ids=["off", "on"])
@pytest.mark.parametrize("raising", [False, True], ids=["returning", "raising"])
def test_the_mode_is_left_as_it_was(before: tuple[bool, bool], raising: bool) -> None:
    def enter() -> None:
        with nan_in_new_tensors():
            if raising:
                raise KeyError

    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        if raising:
            with pytest.raises(KeyError):
                enter()
        else:
            enter()
        assert (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()) == before
        assert settings.fill_uninitialized_memory is fill
    finally:
        torch.use_deterministic_algorithms(False)
