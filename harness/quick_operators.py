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

SIGNED = ("int8", "int16", "int32", "int64")
EXACT = (*SIGNED, "int1", "uint8", "uint16", "uint32", "uint64", "fp32", "fp64")
"""Types that numpy computes in as the interpreter does; 16-bit and 8-bit floats go the interpreter's way."""
NUMBERS = {"fp32": (int, float), "int32": (int,), "int64": (int,)}
"""Python numbers that beside a tensor of the type become one of it."""


class Shortcuts:
    """What is known of the operations that have run, for one process's Triton."""

    def __init__(self, interpreter: Any, core: Any) -> None:
        self.interpreter, self.core = interpreter, core
        self.numbers: dict[Any, Any] = {}
        self.filled: dict[Any, Any] = {}

    def all(self, math: Any) -> dict[Any, Callable[[Function], Function]]:
        """For each of Triton's functions that has one: what makes its shortcut from the interpreter's way."""
        tensor, core = self.core.tensor, self.core
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
        found[core.load] = self._load
        found[core.store] = self._store
        return found

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

    def _binary(self, compute: Any, backwards: bool = False) -> Callable[[Function], Function]:
        tensor, number = self.core.tensor, self.number
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
            if self._agree(made, calculate, a.data, b.data):
                key = left.type.name, right.type.name, a.dtype.name, b.dtype.name
                plans[key] = a.data.dtype, b.data.dtype, ordered and not made.dtype.is_ptr(), calculate, self.like(made)
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

    def _agree(self, made: Any, calculate: Function, *data: Any) -> bool:
        try:
            with np.errstate(all="ignore"):
                mine = calculate(*data)
        except (TypeError, ValueError):
            return False  # the interpreter had changed the operands first
        found = made.handle.data
        same = type(mine) is type(found) is np.ndarray and mine.dtype is found.dtype and mine.shape == found.shape
        return same and mine.tobytes() == found.tobytes() and (made.dtype.is_ptr() or _order(mine) == _order(found))

    def _unary(self, compute: Any) -> Callable[[Function], Function]:
        tensor = self.core.tensor
        plans: dict[Any, Any] = {}

        def shortcut(slow: Function) -> Function:
            def function(x: Any, _semantic: Any = None) -> Any:
                if type(x) is not tensor or x.dtype.name != "fp32":
                    return slow(x)
                handle = x.handle
                make = plans.get((x.type.name, handle.dtype.name))
                if make is None:
                    made = slow(x)
                    if self._agree(made, compute, handle.data):
                        plans[x.type.name, handle.dtype.name] = self.like(made)
                    return made
                return make(compute(handle.data))

            return function

        return shortcut

    def _negative(self, slow: Function) -> Function:
        core, number = self.core, self.number
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
                    plans[key] = made.handle.data.shape, self.like(made)
                return made
            if not data.flags.c_contiguous:
                return slow(of, slices)
            shape, make = plan
            return make(data.reshape(shape))

        return select

    def _cast(self, slow: Function) -> Function:
        core = self.core
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
                if self._agree(made, lambda data: data.astype(made.handle.data.dtype), handle.data):
                    plans[key] = made.handle.data.dtype, self.like(made)
                return made
            return plan[1](handle.data.astype(plan[0]))

        return cast

    def _where(self, slow: Function) -> Function:
        tensor, number = self.core.tensor, self.number
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
                    and self._agree(made, np.where, *datas)
                ):
                    blocks = sum(part.type.is_block() for part in (condition, one, other))
                    plans[key] = dtypes, 0 < blocks < 3, self.like(made)
                return made
            expected, ordered, make = plan
            if expected != dtypes or (ordered and not all(data.flags.c_contiguous for data in datas)):
                return slow(condition, x, y)
            return make(np.where(*datas))

        return where

    def _load(self, slow: Function) -> Function:
        interpreter, tensor, full = self.interpreter, self.core.tensor, self.full
        read, semantic = interpreter._interpreter.load, interpreter.interpreter_semantic
        plans: dict[Any, Any] = {}

        def load(pointer: Any, mask: Any = None, other: Any = None, *more: Any, _semantic: Any = None, **named: Any) -> Any:
            kind = type(other)
            if more or named or type(pointer) is not tensor or not (mask is None or type(mask) is tensor) or not pointer.dtype.is_ptr():
                return slow(pointer, mask, other, *more, **named)
            if not (other is None or kind is int or kind is float) or (mask is None and other is not None) or other != other:
                return slow(pointer, mask, other)
            key = pointer.type.name, None if mask is None else mask.type.name, kind, other
            plan = plans.get(key)
            if plan is None:
                made = slow(pointer, mask, other)
                fits = mask is None or mask.shape is pointer.shape or not mask.type.is_block()
                if fits and made.shape is pointer.shape and pointer.dtype.element_ty.name == made.dtype.name != "int1":
                    default = 0 if other is None else semantic.cast(semantic.to_tensor(other), made.dtype).handle.data.item()
                    plans[key] = made.handle.data.dtype, default, self.like(made)
                return made
            dtype, default, make = plan
            addresses = pointer.handle.data
            shape = addresses.shape
            if mask is None:
                chosen = full(shape, TRUTH, True)
            else:
                chosen = mask.handle.data
                if chosen.dtype is not TRUTH:
                    return slow(pointer, mask, other)
                if chosen.shape != shape:
                    chosen = np.broadcast_to(chosen, shape)
            return make(read(addresses, chosen, full(shape, dtype, default), dtype))

        return load

    def _store(self, slow: Function) -> Function:
        interpreter, tensor, full = self.interpreter, self.core.tensor, self.full
        write, numpy_dtype = interpreter._interpreter.store, interpreter._get_np_dtype

        def store(pointer: Any, value: Any, mask: Any = None, *more: Any, _semantic: Any = None, **named: Any) -> Any:
            plain = not more and not named and type(pointer) is type(value) is tensor and (mask is None or type(mask) is tensor)
            if not plain or not pointer.dtype.is_ptr() or pointer.dtype.const or pointer.dtype.element_ty.name != value.dtype.name:
                return slow(pointer, value, mask, *more, **named)
            fits = value.shape is pointer.shape and (mask is None or (mask.shape is pointer.shape and mask.dtype.name == "int1"))
            if not fits or value.dtype.name == "int1":
                return slow(pointer, value, mask)
            addresses, data = pointer.handle.data, value.handle.data
            chosen = full(addresses.shape, TRUTH, True) if mask is None else mask.handle.data
            if data.dtype is not numpy_dtype(value.dtype) or chosen.dtype is not TRUTH:
                return slow(pointer, value, mask)
            return tensor(write(addresses, data, chosen), self.core.void)

        return store


TRUTH = np.dtype(bool)


def _order(array: Any) -> tuple[int, ...]:
    return tuple([stride for stride, size in zip(array.strides, array.shape, strict=True) if size > 1])


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
