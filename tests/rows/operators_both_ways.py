"""Run by test_quick_interpreter.py: each operation of Triton's interpreter before and after quickening, on the same operands."""

import itertools
import operator
import warnings
from dataclasses import replace

import numpy as np
import triton.language as tl
from triton.language.semantic import IncompatibleTypeErrorImpl
from triton.runtime import interpreter

from attnmatrix.harness.quick_interpreter import quicken

warnings.simplefilter("ignore")
np.seterr(all="ignore")
INTS = [tl.int8, tl.int32, tl.int64, tl.uint8, tl.uint32, tl.uint64]
DTYPES = [tl.int1, *INTS, tl.float16, tl.bfloat16, tl.float32, tl.float64]
SOME = [tl.int1, tl.uint8, tl.int32, tl.int64, tl.bfloat16, tl.float16, tl.float32]
SCALARS = [0, 3, -5, 2**31, 0.0, -0.0, 2.5, 1e-42, 1e300, float("inf"), float("nan"), True]
REFUSALS = (TypeError, ValueError, AttributeError, AssertionError, KeyError, IndexError, OverflowError, IncompatibleTypeErrorImpl)
BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
    *(operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
]


def values(dtype, shape, seed):
    """Ends of the range, zeros, infinities and NaN among random values, as the interpreter holds them."""
    generator, plain = np.random.default_rng(seed), interpreter._get_np_dtype(dtype)
    if dtype.is_int1():
        return generator.integers(0, 2, shape).astype(bool)
    if dtype is tl.bfloat16:
        return (generator.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.is_floating():
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38])
        drawn = generator.standard_normal(shape) * 10
        return np.where(generator.random(shape) < 0.3, generator.choice(special, shape), drawn).astype(plain)
    ends = np.array([np.iinfo(plain).min, np.iinfo(plain).max, 0, 1], plain)
    return np.where(
        generator.random(shape) < 0.3, generator.choice(ends, shape), generator.integers(0, 9, shape).astype(plain) - plain.type(3)
    )


def tensor(dtype, shape, seed, layout="plain"):
    if not shape:
        return tl.tensor(interpreter.TensorHandle(values(dtype, (1,), seed), dtype), dtype)
    data = values(dtype, shape, seed)
    if layout == "turned":
        data = np.ascontiguousarray(data.T).T
    elif layout == "spread":
        data = np.broadcast_to(data[:1], shape)
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)))


def described(compute, *given, **named):
    """All of a result: what it is, its bits, and its order in memory, by which later sums may round."""
    try:
        made = compute(*given, **named)
    except REFUSALS as error:
        return type(error).__name__, str(error)
    if not isinstance(made, tl.tensor) or made.handle is None:
        return repr(made) if made.__class__.__name__ != "tensor" else made.type.name
    data = made.handle.data
    strides = [stride for stride, size in zip(data.strides, data.shape, strict=True) if size > 1]
    plain = np.where(np.isnan(data), np.array(np.nan, data.dtype), data) if data.dtype.kind == "f" else data
    pointer = made.dtype.is_ptr()
    shape = [getattr(extent, "value", extent) for extent in made.shape]
    return (
        *(made.type.name, made.dtype.name, made.handle.dtype.name, shape, made.numel.value),
        *(data.dtype.str, data.shape, None if pointer else strides, plain.tobytes()),
    )


def operands(seed):
    shapes = [((), ()), ((4, 8), (4, 8)), ((4, 8), ()), ((), (4, 8)), ((4, 1), (1, 8)), ((4, 8), (1, 8)), ((8,), (4, 8)), ((4, 8), (2, 8))]
    for (one, other), (left, right) in itertools.product(
        shapes, [("plain", "plain"), ("turned", "plain"), ("turned", "turned"), ("spread", "turned")]
    ):
        yield one, other, left if len(one) == 2 else "plain", right if len(other) == 2 else "plain", seed


def binary(seed):
    for left, right in itertools.product(DTYPES, DTYPES):
        for one, other, a, b, number in itertools.islice(operands(seed), 0, None, 1 if left is right else 11):
            for compute in BINARY:
                yield described(compute, tensor(left, one, number, a), tensor(right, other, number + 1, b))
    placed = [((), "plain"), ((4, 8), "plain"), ((4, 8), "turned")]
    for dtype, (shape, layout), number, compute in itertools.product(SOME, placed, SCALARS, BINARY):
        given = tensor(dtype, shape, seed, layout)
        yield described(compute, given, number)
        yield described(compute, number, given)
    for compute, again in itertools.product(BINARY[:3], BINARY[11:]):  # truth that the interpreter still describes as what was compared
        truth = again(tensor(tl.int32, (4, 8), seed), tensor(tl.int32, (), seed + 1))
        for other in (again(tensor(tl.float32, (), seed), 1), again(tensor(tl.float32, (1, 8), seed), 1), tensor(tl.int1, (4, 8), seed)):
            yield described(operator.and_, truth, other)
            yield described(operator.or_, other, truth)
            yield described(compute, truth, other)


def others(seed):
    for dtype, layout in itertools.product(DTYPES, ["plain", "turned", "spread"]):
        given = tensor(dtype, (4, 8), seed, layout)
        for compute in (tl.exp, tl.exp2, tl.log, tl.log2, tl.sqrt, operator.neg, operator.invert, tl.abs):
            yield described(compute, given)
            yield described(compute, tensor(dtype, (), seed))
        for at in (
            (slice(None), None, slice(None)),
            (None, slice(None), slice(None)),
            (slice(None), slice(None), None),
            (None, 0),
            (None, given),
            3,
        ):
            yield described(operator.getitem, given, at)
        yield described(operator.getitem, given, (None, slice(None), None, slice(None)))
        for to in DTYPES:
            yield described(given.to, to)
            yield described(tensor(dtype, (), seed).to, to)
        for kind, other in itertools.product(DTYPES, [(4, 8), (4, 1), ()]):
            condition = tensor(tl.int1, (4, 8) if seed % 2 else (1, 8), seed)
            yield described(tl.where, condition, given, tensor(kind, other, seed + 1))
            yield described(tl.where, tensor(tl.int1, (), seed), tensor(kind, other, seed + 1), given)
        for number in SCALARS:
            yield described(tl.where, tensor(tl.int1, (4, 8), seed, layout), given, number)
            yield described(tl.where, tensor(tl.int1, (4, 1), seed), number, given)


def memory(seed):
    for dtype in SOME:
        cells = values(dtype, (64,), seed)
        base = tl.pointer_type(dtype)
        start = tl.tensor(interpreter.TensorHandle(np.array([cells.ctypes.data], np.uint64), base), base)
        row, column = tl.arange(0, 4), tl.arange(0, 8)
        for kind in (tl.int32, tl.int64):
            at = (row[:, None] * 8 + column[None, :]).to(kind)
            apart = start + row.to(kind)[:, None] * 8 + column[None, :]
            for pointer in (start + at, at + start, start + 5 + tensor(kind, (), 3) * 0, apart - 1 + 1):
                block = pointer.type.is_block()
                masks = [
                    None,
                    True,
                    tensor(tl.int1, (4, 8), seed),
                    tensor(tl.int1, (1, 8), seed),
                    *(tl.tensor(interpreter.TensorHandle(np.array([truth]), tl.int1), tl.int1) for truth in (False, True)),
                    at < 9,
                    tensor(tl.int32, (4, 8), seed),
                ]
                for mask, other in itertools.product(
                    masks, [None, 0, 0.0, -0.0, 7, 1.5, float("-inf"), float("nan"), tensor(dtype, (), seed)]
                ):
                    yield described(tl.load, pointer, mask=mask, other=other)
                yield described(tl.load, pointer, cache_modifier=".cg")
                yield described(tl.load, pointer, cache_modifier="none such")
                for mask, kept in itertools.product(
                    masks,
                    [tensor(dtype, (4, 8) if block else (), seed + 2), tensor(tl.float32, (), 2), 3, tensor(dtype, (4, 8), 5, "turned")],
                ):
                    yield described(tl.store, pointer, kept, mask=mask)
                    yield cells.tobytes() if dtype is not tl.float16 else np.nan_to_num(cells).tobytes()


def everything():
    patched = interpreter._patch_lang(everything)
    try:
        return [list(part(seed)) for seed in (7,) for part in (binary, others, memory)]
    finally:
        patched.restore()


interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
slow = everything()
quicken()
for again in range(2):
    quick = everything()
    for part, (olds, news) in enumerate(zip(slow, quick, strict=True)):
        for number, (old, new) in enumerate(zip(olds, news, strict=True)):
            assert old == new, (again, part, number, old, new)
print("same", sum(map(len, slow)), sum(len(result) == 2 for results in slow for result in results))
