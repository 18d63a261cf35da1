"""The tape refuses what a CUDA graph cannot capture: values read on the host, shapes that depend on values, copies of host data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attnmatrix.harness.graphs import capturing
from attnmatrix.harness.tape import CaptureError, Tape

X = torch.arange(3)
ONE = torch.tensor(1)
MASK = torch.tensor([True, False, True])
INDEX = torch.tensor([0, 2])
ARRAY = np.arange(3)

READS: dict[str, Callable[[], Any]] = {
    "tolist": X.tolist,
    "cpu": X.cpu,
    "to(cpu)": lambda: X.to("cpu"),
    "to(device=cpu)": lambda: X.to(device="cpu", dtype=torch.float32),
    "numpy": X.numpy,
    "np.asarray": lambda: np.asarray(X),
    "item": ONE.item,
    "bool": lambda: bool(ONE),
    "if": lambda: 1 if X.sum() > 2 else 0,
    "int": lambda: int(ONE),
    "float": lambda: float(ONE),
    "index": lambda: [0, 1, 2][ONE],
    "range": lambda: range(ONE),  # type: ignore[call-overload]
    "in": lambda: 1 in X,
    "max(list)": lambda: max(list(X)),
    "format": lambda: f"{ONE}",
    "repr": lambda: repr(X),
    "torch.equal": lambda: torch.equal(X, X),
    "Tensor.equal": lambda: X.equal(X),
    "torch.allclose": lambda: torch.allclose(X, X),
    "is_nonzero": ONE.is_nonzero,
    "torch.tensor of tensors": lambda: torch.tensor([ONE, ONE]),
    "torch.as_tensor of tensors": lambda: torch.as_tensor([ONE, ONE]),
    "slice end": lambda: X[:ONE],
    "index of one": lambda: X[ONE],
    "size of a new tensor": lambda: torch.zeros(ONE),  # type: ignore[call-overload]
    "arange end": lambda: torch.arange(ONE),
    "boolean index": lambda: X[MASK],
    "boolean index assignment": lambda: X.clone().__setitem__(MASK, torch.zeros(2, dtype=torch.int64)),
    "nonzero": X.nonzero,
    "where of a condition": lambda: torch.where(MASK),
    "masked_select": lambda: X.masked_select(MASK),
    "unique": X.unique,
    "unique_consecutive": lambda: torch.unique_consecutive(X),
    "repeat_interleave": lambda: X.repeat_interleave(X),
    "bincount": lambda: torch.bincount(X),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_host_read_is_refused_and_named(read: Callable[[], Any]) -> None:
    read()  # legal outside a capture
    with pytest.raises(CaptureError, match="reads a tensor's values on the host"), capturing(Tape()):
        read()
    read()  # and after it was refused


COPIES: dict[str, Callable[[], Any]] = {
    "torch.tensor": lambda: torch.tensor([1, 2, 3], device=X.device),
    "torch.tensor, device later": lambda: torch.tensor([1, 2, 3]) + X,
    "torch.tensor of a number": lambda: torch.tensor(3, device=X.device),
    "torch.as_tensor": lambda: torch.as_tensor([1, 2, 3], device=X.device),
    "torch.as_tensor of a number": lambda: torch.as_tensor(3, device=X.device),
    "torch.as_tensor of an array": lambda: torch.as_tensor(ARRAY),
    "torch.asarray": lambda: torch.asarray([1, 2, 3]),
    "torch.asarray of a number, by name": lambda: torch.asarray(obj=3, device=X.device),
    "torch.from_numpy": lambda: torch.from_numpy(ARRAY),
    "new_tensor": lambda: X.new_tensor([1, 2, 3]),
    "new_tensor of a number": lambda: X.new_tensor(3),
    "torch.LongTensor": lambda: torch.LongTensor([1, 2, 3]),
    "index by a list": lambda: X[[0, 2]],
    "index by a host tensor": lambda: X[torch.tensor([0, 2])],
    "index by an array": lambda: X[ARRAY],
    "assignment by a list": lambda: X.clone().__setitem__([0, 2], 7),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_a_copy_of_host_data_is_refused_and_named(copy: Callable[[], Any]) -> None:
    copy()  # legal outside a capture
    with pytest.raises(CaptureError, match="copies host data to the device"), capturing(Tape()):
        copy()


ALLOWED: dict[str, Callable[[], Any]] = {
    "shape": lambda: X.shape[0] + X.numel() + len(X) + X.stride(0),
    "dtype and device": lambda: (X.dtype, X.device, X.is_contiguous(), X.data_ptr()),
    "to(dtype)": lambda: X.to(torch.float32),
    "to(device)": lambda: X.to(X.device),
    "integer index": lambda: X[INDEX],
    "torch.where": lambda: torch.where(MASK, X, 0),
    "masked fill by index": lambda: X.clone().__setitem__(MASK, 7),
    "repeat_interleave with its size": lambda: torch.repeat_interleave(X, output_size=3),
    "repeat_interleave by a number": lambda: X.repeat_interleave(2),
    "a host number": lambda: torch.tensor(3) + X,
    "a number put in": lambda: X.clone().__setitem__(0, 7),
    "numbers put in": lambda: X.clone().__setitem__(slice(0, 2), 7),
    "numbers put in by index": lambda: X.clone().__setitem__(INDEX, 7),
    "no host data": lambda: torch.tensor([], device=X.device),
    "torch.full": lambda: torch.full((3,), 2, device=X.device) + torch.scalar_tensor(2, device=X.device),
    "torch.where of numbers": lambda: torch.where(MASK, 1.0, 0.0),
    "torch.arange and eye": lambda: torch.arange(3, device=X.device) + torch.eye(3, device=X.device),
    "torch.as_tensor of a tensor": lambda: torch.as_tensor(X, device=X.device),
    "torch.asarray of a tensor": lambda: torch.asarray(X, device=X.device),
}


@pytest.mark.parametrize("work", ALLOWED.values(), ids=ALLOWED)
def test_what_a_graph_can_capture_is_not_refused(work: Callable[[], Any]) -> None:
    with capturing(Tape()):
        work()


def test_the_message_names_the_operation() -> None:
    with pytest.raises(CaptureError, match="tolist"), capturing(Tape()):
        X.tolist()
    with pytest.raises(CaptureError, match="nonzero"), capturing(Tape()):
        X.nonzero()


def test_a_read_inside_a_custom_operator_is_refused() -> None:
    @torch.library.custom_op("attnmatrix_tests::sum_on_host", mutates_args=())
    def sum_on_host(x: Tensor) -> Tensor:
        return x * sum(x.tolist())

    sum_on_host(X)
    with pytest.raises(CaptureError, match="tolist"), capturing(Tape()):
        sum_on_host(X)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_read_inside_a_flex_mask_is_refused() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 4, 16)
    with pytest.raises(CaptureError), capturing(Tape()):
        flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * ONE.item())
