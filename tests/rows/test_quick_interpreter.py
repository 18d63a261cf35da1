"""What the quickened interpreter computes is what Triton's own computes, to the bit, and what it refuses is refused."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = """
import sys

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from attnmatrix.harness.quick_interpreter import quicken


@triton.jit
def squared(x):
    return x * x


@triton.jit
def mixed(floats, ints, halves, out, wide, some, STEP: tl.constexpr):
    row, column = tl.arange(0, 4), tl.arange(0, 8)
    at = row[:, None] * 8 + column[None, :]
    a, n, h = tl.load(floats + at), tl.load(ints + at), tl.load(halves + at)
    one = tl.load(floats + some)
    inside = (n > 2) & (column[None, :] < 8 - some) | (at == STEP)
    number = n + 2 * STEP - 7 // 2 + n % 3 + n.to(tl.int64) * some
    value = a / 3 + 2.5 * squared(a) - one + h * 0.1 + h * a + (1 - n) * 1.5 + tl.minimum(1e30 * a, 1.0) + n / 2 + (n << 1) + STEP / (a * a + 1)
    value += tl.sum(a, axis=1)[:, None] * tl.max(h.to(tl.float32), axis=0)[None, :]
    value += tl.sum(tl.dot(a, tl.trans(a)), axis=1)[:, None]
    for turn in range(2):
        value = tl.where(inside, value * turn, -value + one)
    tl.store(out + at, value, mask=at < 31)
    tl.store(wide + at, number)


@triton.jit
def unequal(floats, out):
    tl.store(out + tl.arange(0, 4), tl.load(floats + tl.arange(0, 4)) + tl.arange(0, 8))


@triton.jit
def no_power_of_two(floats, out):
    tl.store(out + tl.arange(0, 4), tl.zeros([3], tl.float32))


@triton.jit
def float_bits(floats, out):
    tl.store(out + tl.arange(0, 4), tl.load(floats + tl.arange(0, 4)) & 3)


def results():
    generator = torch.Generator().manual_seed(0)
    floats, halves = torch.randn(32, generator=generator), torch.randn(32, generator=generator).half()
    found = [torch.zeros(32), torch.zeros(32, dtype=torch.int64)]
    mixed[(1,)](floats, torch.arange(32, dtype=torch.int32), halves, *found, 3, 5)
    for kernel in (unequal, no_power_of_two, float_bits):
        try:
            kernel[(1,)](floats, found[0])
            found.append("ran")
        except Exception as error:
            found.append(repr(error))
    return found


slow = results()
sanitized = interpreter.interpreter_builder.options.sanitize_overflow
quicken()
assert sanitized and not interpreter.interpreter_builder.options.sanitize_overflow
for again in range(2):
    for old, new in zip(slow, results(), strict=True):
        assert old == new if isinstance(old, str) else torch.equal(old, new), (old, new)
assert "ran" not in slow and bool(slow[0].any())
print("same")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="about Triton's interpreter")
def test_same_results_and_same_refusals(tmp_path: Path) -> None:
    script = tmp_path / "compare.py"
    script.write_text(KERNELS)
    assert _interpreted(script).strip() == "same"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="about Triton's interpreter")
def test_each_operation_gives_the_same_bits_in_the_same_order() -> None:
    same, compared, refused = _interpreted(Path(__file__).with_name("operators_both_ways.py")).split()
    assert same == "same"
    assert int(refused) < int(compared) / 3


def _interpreted(script: Path) -> str:
    run = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
