"""Writes beside a package's own tensors are reported and reach nothing else."""

from __future__ import annotations

import pytest
import torch

from attnmatrix.harness.scratch import OutOfBoundsWrite, fenced_scratch
from attnmatrix.harness.uninitialised import nan_in_new_tensors


def write_past_the_end(tensor: torch.Tensor, distance: int) -> None:
    tensor.as_strided((1,), (1,), tensor.storage_offset() + tensor.numel() - 1 + distance).fill_(7)


def test_a_write_past_the_end_is_named() -> None:
    with pytest.raises(OutOfBoundsWrite, match=r"shape \(3, 4\)"), fenced_scratch():
        write_past_the_end(torch.empty(3, 4), 1)


def test_a_write_before_the_start_is_named() -> None:
    with pytest.raises(OutOfBoundsWrite), fenced_scratch():
        write_past_the_end(torch.zeros(5, dtype=torch.int32), -5)


def test_writes_inside_are_no_one_elses_business() -> None:
    with fenced_scratch():
        tensor = torch.empty_like(torch.ones(2, 3, dtype=torch.bfloat16))
        tensor.fill_(2)
        write_past_the_end(tensor, 0)
    assert tensor.flatten().tolist() == [2, 2, 2, 2, 2, 7]


def test_values_and_shapes_are_those_of_plain_allocations() -> None:
    with nan_in_new_tensors(), fenced_scratch():
        assert torch.empty(2, 3).isnan().all()
        assert torch.zeros(2, 3).eq(0).all()
        assert torch.empty(0, 4).shape == (0, 4)
        assert torch.zeros(3, dtype=torch.bool).tolist() == [False] * 3
