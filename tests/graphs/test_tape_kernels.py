"""Work that is more than torch operators: Triton launches, custom operators, FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnmatrix.harness.graphs import capturing
from attnmatrix.harness.interpreter import prepare_triton
from attnmatrix.harness.tape import Tape

LENS = (7, 3)


def check(work: Callable[..., Tensor], *floats: Tensor) -> None:
    """Capture ``work`` on ``floats`` and lengths, change both in place, and hold each replay against the work done afresh."""
    tape, lens = Tape(), torch.tensor(LENS, dtype=torch.int32)
    with capturing(tape):
        result = work(*floats, lens)
    for _ in range(3):
        for tensor in floats:
            tensor.copy_(torch.randn(tensor.shape))
        lens.copy_(lens.roll(1))
        result.fill_(float("nan"))
        tape.replay()
        assert torch.equal(result, work(*floats, lens))


@pytest.fixture(scope="module")
def kernel() -> Any:
    """A Triton kernel in the interpreter: ``out[i] = sum of x[0 .. lens[i]]``."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU this process compiles Triton kernels, and a CUDA graph holds their launches")
    prepare_triton(torch.device("cpu"), interpreted=True)
    import triton
    import triton.language as tl

    @triton.jit
    def prefix_sums(x, lens, out, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0)
        at = tl.arange(0, BLOCK)
        values = tl.load(x + row * stride + at, mask=at < tl.load(lens + row), other=0.0)
        tl.store(out + row, tl.sum(values, axis=0))

    return prefix_sums


def test_a_triton_launch(kernel: Any) -> None:
    def work(x: Tensor, lens: Tensor) -> Tensor:
        out = torch.empty(2)
        kernel[(2,)](x, lens, out, x.stride(0), BLOCK=8)
        return out * 2

    check(work, torch.randn(2, 8))


def test_a_triton_launch_is_one_entry_with_frozen_scalars(kernel: Any) -> None:
    tape, x, lens, out = Tape(), torch.ones(2, 8), torch.tensor(LENS, dtype=torch.int32), torch.empty(2)
    strides = [x.stride(0)]
    with capturing(tape):
        kernel[(2,)](x, lens, out, strides[0], BLOCK=8)
    strides[0] = 0
    lens.copy_(torch.tensor([1, 2]))
    tape.replay()
    assert out.tolist() == [1.0, 2.0]
    assert len(tape) == 1


def test_a_custom_operator_is_captured_inside(kernel: Any) -> None:
    scale = [2.0]

    @torch.library.custom_op("attnmatrix_tests::scaled_sums", mutates_args=())
    def scaled_sums(x: Tensor, lens: Tensor) -> Tensor:
        out = torch.empty(2)
        kernel[(2,)](x, lens, out, x.stride(0), BLOCK=8)
        return out * scale[0]

    x, lens, tape = torch.ones(2, 8), torch.tensor(LENS, dtype=torch.int32), Tape()
    with capturing(tape):
        out = scaled_sums(x, lens)
    scale[0] = 100.0
    lens.fill_(3)
    tape.replay()
    assert out.tolist() == [6.0, 6.0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_flex_attention(compiled: bool) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    bias = [0.5]
    attend = torch.compile(flex_attention, backend="eager") if compiled else flex_attention

    def work(q: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, i, j: j < lens[b], 2, None, 4, 16, device="cpu", BLOCK_SIZE=16)
        out: Tensor = attend(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[0] * j, block_mask=mask, enable_gqa=True)
        return out

    q, k, v = torch.randn(2, 4, 4, 16), torch.randn(2, 2, 16, 16), torch.randn(2, 2, 16, 16)
    lens = torch.tensor(LENS)
    check(work, q, k, v)
    tape = Tape()
    with capturing(tape):
        out = work(q, k, v, lens)
    right = out.clone()
    bias[0] = -3.0
    tape.replay()
    assert torch.equal(out, right), "Python read at replay: a graph has it frozen"
