"""Rows hand the physical pool to their kernel: what they copy out of it themselves is counted, and must be nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.interpreter import prepare_triton
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import Row, find_row
from attnmatrix.harness.world import World

SOFTMAX_CASES = (
    "extend-p16-prefix0.20.33-new18.7.1-h4x2x64-fp32-shuffled",
    "decode-p16-prefix14.150.16-new1.1.1-h4x2x64-fp32-shuffled",
    "target_verify-p16-prefix14.31-new4.4-h4x2x64-fp32-shuffled",
)
LIGHTNING_CASES = (
    "lightning-extend-p16-prefix0.20-new18.3-h2x2x128-fp32-shuffled",
    "lightning-decode-p16-prefix14.15-new1.1-h2x2x128-fp32-shuffled",
    "lightning-target_verify-p16-prefix14.31-new4.4-h2x2x128-fp32-shuffled",
)
ROWS = (
    *(("conch", case) for case in SOFTMAX_CASES),
    *(("flex", case) for case in SOFTMAX_CASES),
    *(("seg_la", case) for case in LIGHTNING_CASES),
    *(("sgl-triton", case) for case in SOFTMAX_CASES),
)


class CopiedBytes(TorchDispatchMode):
    """Sums the bytes of new storages that operators fill from watched ones. Kernels and FlexAttention count as one operator each, whose
    output is the row's result."""

    supports_higher_order_operators = True

    def __init__(self, watched: list[Tensor]) -> None:
        super().__init__()
        self.watched = {_storage(tensor) for tensor in watched}
        self.total = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        reads = any(isinstance(leaf, Tensor) and _storage(leaf) in self.watched for leaf in tree_leaves((args, kwargs)))
        if reads and not isinstance(func, torch._ops.HigherOrderOperator):
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and _storage(leaf) not in self.watched]
            self.total += sum(tensor.numel() * tensor.element_size() for tensor in made)
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def copied(row: Row, case_id: str, device: torch.device) -> int:
    case = parse_case(case_id)
    mode = RunnerMode.VERIFY if case.forward.seq_lens_is_prefix else RunnerMode.EAGER
    prepare_triton(device, row.interpreted)
    world = World(case, mode, PEAKED, row.conventions, device)
    backend, batch = row.create(world.context), world.batch(0)
    backend.prepare_metadata(batch)
    pools = [pool for pool in (world.context.kv, world.context.states) if pool is not None]
    counter = CopiedBytes([fenced.tensor for pool in pools for fenced in pool.fenced])
    given = world.steps[0].inputs[0]
    with ExitStack() as modes:
        modes.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code would pass the counter by
        modes.enter_context(counter)
        backend.forward(given.q, given.k, given.v, 0, batch)
    return counter.total


@pytest.mark.parametrize(("name", "case"), ROWS)
def test_nothing_is_copied_out_of_the_pool(name: str, case: str, device: torch.device) -> None:
    row = find_row(name, parse_case(case).kind)
    if row.missing:
        pytest.skip(f"{name}: package not installed")
    if name == "flex" and device.type == "cuda":
        pytest.skip("compiled code passes the dispatcher by")
    assert copied(row, case, device) == 0


@pytest.mark.parametrize("case", SOFTMAX_CASES)
def test_the_counter_sees_the_torch_row_gather(case: str, device: torch.device) -> None:
    assert copied(find_row("torch", AttentionKind.SOFTMAX), case, device) > 0
