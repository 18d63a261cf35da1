"""Shortcuts for loads and stores in Triton's interpreter: see ``quick_tensors.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnmatrix.harness.quick_tensors import TRUTH, Function, Tensors


class Memory:
    """Shortcuts for what reads and writes memory."""

    def __init__(self, known: Tensors) -> None:
        self.known = known

    def all(self) -> dict[Any, Callable[[Function], Function]]:
        """For each of Triton's functions that has one: what makes its shortcut from the interpreter's way."""
        return {self.known.core.load: self._load, self.known.core.store: self._store}

    def _load(self, slow: Function) -> Function:
        interpreter, tensor, full = self.known.interpreter, self.known.core.tensor, self.known.full
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
                    plans[key] = made.handle.data.dtype, default, self.known.like(made)
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
        interpreter, tensor, full = self.known.interpreter, self.known.core.tensor, self.known.full
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
            return tensor(write(addresses, data, chosen), self.known.core.void)

        return store
