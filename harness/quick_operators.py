"""Shortcuts for the operators, functions and casts of Triton's interpreter: see ``quick_tensors.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnmatrix.harness.quick_tensors import TRUTH, Function, Tensors

SIGNED = ("int8", "int16", "int32", "int64")
EXACT = (*SIGNED, "int1", "uint8", "uint16", "uint32", "uint64", "fp32", "fp64")
"""Types that numpy computes in as the interpreter does; 16-bit and 8-bit floats go the interpreter's way."""


class Operators:
    """Shortcuts for what computes."""

    def __init__(self, known: Tensors) -> None:
        self.known = known

    def all(self, math: Any) -> dict[Any, Callable[[Function], Function]]:
        """For each of Triton's functions that has one: what makes its shortcut from the interpreter's way."""
        tensor, core = self.known.core.tensor, self.known.core
        found: dict[Any, Callable[[Function], Function]] = {}
        for name, compute in BINARY.items():
            found[getattr(tensor, f"__{name}__")] = self._binary(compute)
            backwards = getattr(tensor, f"__r{name}__", None)
            if backwards is not None:
                found[backwards] = self._binary(compute, backwards=True)
        for name, compute in UNARY.items():
            found[getattr(math, name)] = self._unary(compute)
        found[tensor.__neg__] = self._negative
        found[tensor.__getitem__] = self._new_axes
        found[tensor.to] = self._cast
        found[core.where] = self._where
        return found

    def _binary(self, compute: Any, backwards: bool = False) -> Callable[[Function], Function]:
        tensor, number = self.known.core.tensor, self.known.number
        plans: dict[Any, Any] = {}

        def shortcut(slow: Function) -> Function:
            def operator(self: Any, other: Any, _semantic: Any = None) -> Any:
                given = other
                if type(other) is not tensor:
                    kind = type(other)
                    given = number(other, self.dtype) if kind is int or kind is float else None
                    if given is None:
                        return slow(self, other)
                left, right = (given, self) if backwards else (self, given)
                try:
                    a, b = left.handle, right.handle
                    plan = plans.get((left.type.name, right.type.name, a.dtype.name, b.dtype.name))
                except AttributeError:
                    return slow(self, other)
                if plan is None:
                    return learn(left, right, slow(self, other))
                a, b = a.data, b.data
                left_dtype, right_dtype, ordered, calculate, make = plan
                if a.dtype is not left_dtype or b.dtype is not right_dtype:
                    return slow(self, other)
                if ordered and not (a.flags.c_contiguous and b.flags.c_contiguous):
                    return slow(self, other)
                return make(calculate(a, b))

            return operator

        def learn(left: Any, right: Any, made: Any) -> Any:
            calculate = self._calculation(compute, left, right)
            if calculate is None or type(made) is not tensor:
                return made
            a, b = left.handle, right.handle
            ordered = left.dtype.name != right.dtype.name or left.type.is_block() != right.type.is_block()
            if self.known.agree(made, calculate, a.data, b.data):
                key = left.type.name, right.type.name, a.dtype.name, b.dtype.name
                plans[key] = a.data.dtype, b.data.dtype, ordered and not made.dtype.is_ptr(), calculate, self.known.like(made)
            return made

        return shortcut

    def _calculation(self, compute: Any, left: Any, right: Any) -> Function | None:
        """How ``compute`` is done on the data of the two; None where it is left to the interpreter."""
        one, other = left.dtype.name, right.dtype.name
        if compute is np.add and left.dtype.is_ptr() and other in SIGNED[2:] and left.dtype.address_space == 1:
            return _moved(max(1, left.dtype.element_ty.primitive_bitwidth // 8))
        if compute is np.add and right.dtype.is_ptr() and one in SIGNED[2:] and right.dtype.address_space == 1:
            move = _moved(max(1, right.dtype.element_ty.primitive_bitwidth // 8))
            return lambda offset, address: move(address, offset)
        if (one == other and one in EXACT) or (one in SIGNED and other in SIGNED):
            return compute  # type: ignore[no-any-return]
        return None

    def _unary(self, compute: Any) -> Callable[[Function], Function]:
        tensor = self.known.core.tensor
        plans: dict[Any, Any] = {}

        def shortcut(slow: Function) -> Function:
            def function(x: Any, _semantic: Any = None) -> Any:
                if type(x) is not tensor or x.dtype.name != "fp32":
                    return slow(x)
                handle = x.handle
                make = plans.get((x.type.name, handle.dtype.name))
                if make is None:
                    made = slow(x)
                    if self.known.agree(made, compute, handle.data):
                        plans[x.type.name, handle.dtype.name] = self.known.like(made)
                    return made
                return make(compute(handle.data))

            return function

        return shortcut

    def _negative(self, slow: Function) -> Function:
        core, number = self.known.core, self.known.number
        subtract = self._binary(np.subtract, backwards=True)(lambda of, zero: slow(of))

        def negative(of: Any, _semantic: Any = None) -> Any:
            return subtract(of, 0) if type(of) is core.tensor and number(0, of.dtype) is not None else slow(of)

        return negative

    def _new_axes(self, slow: Function) -> Function:
        plain = slice(None)
        plans: dict[Any, Any] = {}

        def select(of: Any, slices: Any, _semantic: Any = None) -> Any:
            if type(slices) is not tuple or not of.type.is_block():
                return slow(of, slices)
            key = (
                of.type.name,
                of.handle.dtype.name,
                *[part is None or (type(part) is slice and part == plain and "all") for part in slices],
            )
            data, plan = of.handle.data, plans.get(key)
            if plan is None:
                made = slow(of, slices)
                if len(slices) == len(of.shape) + sum(part is None for part in slices):
                    plans[key] = made.handle.data.shape, self.known.like(made)
                return made
            if not data.flags.c_contiguous:
                return slow(of, slices)
            shape, make = plan
            return make(data.reshape(shape))

        return select

    def _cast(self, slow: Function) -> Function:
        core = self.known.core
        plans: dict[Any, Any] = {}
        known = {"int1", "int32", "int64", "fp32"}

        def cast(of: Any, dtype: Any, *more: Any, _semantic: Any = None, **named: Any) -> Any:
            if more or named or type(dtype) is not core.dtype or type(of) is not core.tensor:
                return slow(of, dtype, *more, **named)
            name, to = of.dtype.name, dtype.name
            if name == to:
                return of
            if name not in known or to not in known or to == "int1":
                return slow(of, dtype)
            handle = of.handle
            key = of.type.name, handle.dtype.name, to
            plan = plans.get(key)
            if plan is None:
                made = slow(of, dtype)
                if self.known.agree(made, lambda data: data.astype(made.handle.data.dtype), handle.data):
                    plans[key] = made.handle.data.dtype, self.known.like(made)
                return made
            return plan[1](handle.data.astype(plan[0]))

        return cast

    def _where(self, slow: Function) -> Function:
        tensor, number = self.known.core.tensor, self.known.number
        plans: dict[Any, Any] = {}

        def where(condition: Any, x: Any, y: Any, _semantic: Any = None) -> Any:
            one, other = x, y
            if type(x) is tensor and type(y) in (int, float):
                other = number(y, x.dtype)
            elif type(y) is tensor and type(x) in (int, float):
                one = number(x, y.dtype)
            if not type(condition) is type(one) is type(other) is tensor or one.dtype.name != other.dtype.name:
                return slow(condition, x, y)
            c, a, b = condition.handle, one.handle, other.handle
            key = condition.type.name, one.type.name, other.type.name, c.dtype.name, a.dtype.name, b.dtype.name
            plan = plans.get(key)
            datas = c.data, a.data, b.data
            dtypes = tuple([data.dtype for data in datas])
            if plan is None:
                made = slow(condition, x, y)
                if (
                    condition.dtype.name == "int1"
                    and one.dtype.name in EXACT
                    and dtypes[0] is TRUTH
                    and self.known.agree(made, np.where, *datas)
                ):
                    blocks = sum(part.type.is_block() for part in (condition, one, other))
                    plans[key] = dtypes, 0 < blocks < 3, self.known.like(made)
                return made
            expected, ordered, make = plan
            if expected != dtypes or (ordered and not all(data.flags.c_contiguous for data in datas)):
                return slow(condition, x, y)
            return make(np.where(*datas))

        return where


def _moved(width: int) -> Function:
    size = np.array(width, np.uint64)

    def move(address: Any, offset: Any) -> Any:
        return address + size * offset.astype(np.uint64)

    return move


def _quotient(a: Any, b: Any) -> Any:
    return (a - np.fmod(a, b)) // b


BINARY: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "floordiv": _quotient,
    "mod": np.fmod,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
UNARY: dict[str, Any] = {"exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "sqrt": np.sqrt}
