"""Direct ways through Triton's interpreter: once an operation has run in the interpreter on operands of certain types, the next on the
same types asks numpy at once and describes the result as the first was described.

A shortcut is kept only if, beside the interpreter's first result, it gives the same bits in the same order in memory: sums and matrix
products further on may round by that order. What a shortcut does not cover, and every error, is the interpreter's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Function = Callable[..., Any]

TRUTH = np.dtype(bool)
NUMBERS = {"fp32": (int, float), "int32": (int,), "int64": (int,)}
"""Python numbers that beside a tensor of the type become one of it."""


class Tensors:
    """How one process's Triton describes results, and what numbers and filled arrays it has made."""

    def __init__(self, interpreter: Any, core: Any) -> None:
        self.interpreter, self.core = interpreter, core
        self.numbers: dict[Any, Any] = {}
        self.filled: dict[Any, Any] = {}

    def like(self, sample: Any) -> Callable[[Any], Any]:
        """Makes tensors described as ``sample`` is."""
        new, handle_type, tensor = object.__new__, self.interpreter.TensorHandle, self.core.tensor
        kind, dtype, shape, numel, held = sample.type, sample.dtype, sample.shape, sample.numel, sample.handle.dtype

        def make(data: Any) -> Any:
            handle = new(handle_type)
            handle.data, handle.dtype, handle.attr = data, held, {}
            made = new(tensor)
            made.handle, made.shape, made.numel, made.type, made.dtype = handle, shape, numel, kind, dtype
            return made

        return make

    def number(self, value: Any, dtype: Any) -> Any:
        """The tensor that ``value`` becomes beside one of ``dtype``, or None where the interpreter must say."""
        key = dtype.name, type(value), value
        found = self.numbers.get(key, self)
        if found is not self:
            return found
        found = None
        size = abs(value)
        if type(value) in NUMBERS.get(dtype.name, ()) and (size == 0 or 2.0**-126 <= size < 2**31 or size == float("inf")):
            found = self.interpreter.interpreter_semantic.scalar_constant(value, dtype)
        if value == value:
            self.numbers[key] = found
        return found

    def full(self, shape: tuple[int, ...], dtype: Any, value: Any) -> Any:
        """An array that nobody writes to, of one value."""
        key = shape, dtype.char, type(value), value
        found = self.filled.get(key)
        if found is None:
            found = self.filled[key] = np.full(shape, value, dtype)
            found.flags.writeable = False
        return found

    def agree(self, made: Any, calculate: Function, *data: Any) -> bool:
        """Whether ``calculate`` gives what the interpreter ``made`` of the same data, to the bit and in the same order in memory."""
        try:
            with np.errstate(all="ignore"):
                mine = calculate(*data)
        except (TypeError, ValueError):
            return False  # the interpreter had changed the operands first
        found = made.handle.data
        same = type(mine) is type(found) is np.ndarray and mine.dtype is found.dtype and mine.shape == found.shape
        return same and mine.tobytes() == found.tobytes() and (made.dtype.is_ptr() or order(mine) == order(found))


def order(array: Any) -> tuple[int, ...]:
    return tuple([stride for stride, size in zip(array.strides, array.shape, strict=True) if size > 1])
