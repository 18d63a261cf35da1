"""The tape: whatever kind of work was captured, a replay computes it from what the inputs hold then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnmatrix.harness.graphs import capturing
from attnmatrix.harness.tape import Tape


def check(work: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Capture ``work`` on ``inputs``, change them three times in place, and hold each replay against the work done afresh."""
    tape = Tape()
    with capturing(tape):
        result = work(*inputs)
    first = result.clone()
    for _ in range(3):
        for tensor in inputs:
            if tensor.dtype.is_floating_point:
                tensor.copy_(torch.randn(tensor.shape))
            else:
                tensor.copy_(tensor.roll(1))
        right = work(*(tensor.clone() for tensor in inputs))
        result.fill_(float("nan") if result.dtype.is_floating_point else -1)
        tape.replay()
        assert torch.equal(result, right)
    assert not torch.equal(first, right), "the inputs did not change the result: nothing was tested"


def test_an_allocation_and_its_arithmetic() -> None:
    def work(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.copy_(x * 2)
        return out + torch.zeros(3)

    check(work, torch.randn(4, 3))


def test_uninitialised_memory_keeps_what_it_held_or_is_filled_but_is_never_restored() -> None:
    tape = Tape()
    source = torch.ones(4)
    with capturing(tape):
        out = torch.empty(4)
        out[:2] = source[:2]
    out.fill_(5.0)
    source.fill_(2.0)
    tape.replay()
    assert out[:2].tolist() == [2.0, 2.0]


def test_an_in_place_write() -> None:
    def work(x: Tensor) -> Tensor:
        total = torch.zeros(3)
        for row in x:
            total.add_(row)
        total[1:] *= 3
        return total

    check(work, torch.randn(4, 3))


def test_in_place_work_on_an_input_accumulates() -> None:
    tape, counter = Tape(), torch.zeros(())
    with capturing(tape):
        counter.add_(1)
    for _ in range(2):
        tape.replay()
    assert counter == 3


def test_views_of_inputs_and_of_results() -> None:
    def work(x: Tensor) -> Tensor:
        flat = x.view(-1).unflatten(0, (2, 6)).transpose(0, 1)
        halves = (flat * 2).split(3)
        halves[1].zero_()
        return torch.cat([halves[0], halves[1], flat[::2].expand(3, 2)])

    check(work, torch.randn(4, 3))


def test_a_reshape_that_copies() -> None:
    check(lambda x: x.t().reshape(-1) + x.t().contiguous().view(-1), torch.randn(4, 3))


def test_index_put_and_gather_follow_their_indices() -> None:
    pool = torch.zeros(8, 2)

    def work(x: Tensor, at: Tensor) -> Tensor:
        fresh = pool.clone()
        fresh[at] = x
        return fresh[at.flip(0)] + fresh.index_select(0, at)

    check(work, torch.randn(3, 2), torch.tensor([6, 1, 4]))


def test_a_mask_with_a_scalar_is_a_fill() -> None:
    def work(x: Tensor) -> Tensor:
        copy = x.clone()
        copy[x > 0] = 0
        return copy

    check(work, torch.randn(20))


def test_out_arguments() -> None:
    def work(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty(4, 4)
        torch.matmul(x, y, out=out)
        torch.add(out, 1, out=out)
        return out

    check(work, torch.randn(4, 3), torch.randn(3, 4))


def test_several_results_and_lists() -> None:
    def work(x: Tensor) -> Tensor:
        values, indices = x.max(dim=0)
        wide = torch._foreach_mul([x[0], x[1]], 2.0)
        return torch.stack([values, indices.float(), *wide])

    check(work, torch.randn(4, 3))


def test_scaled_dot_product_attention() -> None:
    q, k, v = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 5, 16), torch.randn(2, 4, 5, 16)
    check(torch.nn.functional.scaled_dot_product_attention, q, k, v)


def test_values_computed_in_python_are_frozen() -> None:
    tape, source, scale = Tape(), torch.ones(3), [2.0]
    with capturing(tape):
        out = source * scale[0]
    scale[0] = 100.0
    source.fill_(3.0)
    tape.replay()
    assert out.tolist() == [6.0] * 3


@pytest.mark.parametrize(
    "rebind", [lambda own, other: own.set_(other), lambda own, other: setattr(own, "data", other)], ids=["set_", "data"]
)
def test_memory_is_frozen_even_if_a_tensor_is_given_other_memory(rebind: Callable[[Tensor, Tensor], object]) -> None:
    tape, source = Tape(), torch.ones(3)
    with capturing(tape):
        out = source * 2
    rebind(source, torch.full((3,), 50.0))
    tape.replay()
    assert out.tolist() == [2.0] * 3


def test_two_tapes_on_shared_memory_do_not_disturb_each_other() -> None:
    source, results = torch.randn(4), []
    for scale in (2, 3):
        tape = Tape()
        with capturing(tape):
            out = source * scale
        results.append((tape, out, scale))
    for turn in (0, 1, 0):
        source.add_(1)
        tape, out, scale = results[turn]
        tape.replay()
        assert torch.equal(out, source * scale)


def test_nothing_is_recorded_outside_begin_and_end() -> None:
    tape, source = Tape(), torch.ones(3)
    with capturing(tape):
        out = source + 1
    source.mul_(10)
    tape.replay()
    assert out.tolist() == [11.0] * 3
