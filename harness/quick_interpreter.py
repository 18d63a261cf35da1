"""Triton's interpreter made quicker, results unchanged: most of its time goes into Python objects that describe a value, not into the value.

Each part stands in for one of the interpreter's own functions: it remembers what that function made of the same arguments, or leaves out
steps that cannot change anything. Errors are raised as before, since only what succeeded is remembered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from typing import Any

TRIED = "3.7."
"""Triton's version whose interpreter the parts below were made for."""


@cache
def quicken() -> None:
    """Let 32-bit integers wrap, as in compiled kernels, instead of checking each result; look up by name what each call patches in
    Triton's language; describe each shape and each type once. Once in a process, when Triton has been imported for the interpreter."""
    import triton
    from triton.language import core
    from triton.runtime import interpreter

    from attnmatrix.harness.quick_memory import Memory
    from attnmatrix.harness.quick_operators import Operators
    from attnmatrix.harness.quick_tensors import Tensors

    if not triton.__version__.startswith(TRIED):
        return  # its interpreter may be built otherwise: it stays as it is, slower
    builder = interpreter.interpreter_builder
    if builder.options.sanitize_overflow:
        builder.options = replace(builder.options, sanitize_overflow=False)
    known = Tensors(interpreter, core)
    _patch_by_name(interpreter, {**Operators(known).all(triton.language.math), **Memory(known).all()})
    _patch_once(interpreter, triton.language)
    interpreter._get_np_dtype = _remembered_by_name(interpreter._get_np_dtype)
    _describe_once(core)
    _compare_at_once(core)
    _skip_conversions(interpreter, core)


def _patch_by_name(interpreter: Any, shortcuts: dict[Any, Callable[..., Any]]) -> None:
    """What is patched is the same at each call: no search among all members. A patched function takes the interpreter's semantics
    whatever it is given, and needs no check that it was given any."""
    from triton import language

    parts = (language, language.core, language.tensor, language.math, language.core.tensor_descriptor_base)
    names = {part: [name for name, member in inspect.getmembers(part) if language.core.is_builtin(member)] for part in parts}
    checked = language.core.builtin(len).__code__
    semantic, search = interpreter.interpreter_semantic, interpreter._patch_builtin

    @cache
    def interpreted(member: Any) -> Callable[..., Any]:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is checked else member

        def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return inner(*args, _semantic=semantic, **kwargs)

        return shortcuts[member](call) if member in shortcuts else call

    def patch(part: Any, builder: Any, scope: Any) -> None:
        if part not in names:
            search(part, builder, scope)
            return
        if names[part] and not language.core.is_builtin(getattr(part, names[part][0])):
            return  # patched already, by the function that calls this one
        for name in names[part]:
            member = getattr(part, name)
            if language.core.is_builtin(member):
                scope.set_attr(part, name, interpreted(member))

    interpreter._patch_builtin = patch


def _patch_once(interpreter: Any, language: Any) -> None:
    """A function that a kernel calls finds the language patched by the kernel's launch, which also restores it."""
    patch, none_patched, is_builtin = interpreter._patch_lang, interpreter._LangPatchScope, language.core.is_builtin

    @cache
    def modules(function: Any, names: int) -> tuple[Any, ...]:
        named = list(function.__globals__.values())
        return tuple(module for module in (language, language.core) if any(value is module for value in named))

    def patch_language(function: Any) -> Any:
        needed = modules(function, len(function.__globals__))
        if not needed or any(is_builtin(part) for part in (language.core.tensor.__add__, *[module.load for module in needed])):
            return patch(function)
        return none_patched()

    interpreter._patch_lang = patch_language


def _remembered_by_name(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``function`` of a Triton type, whose name says all about it."""
    known: dict[str, Any] = {}

    @wraps(function)
    def remembered(dtype: Any) -> Any:
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = function(dtype)
        return found

    return remembered


def _describe_once(core: Any) -> None:
    """Equal shapes share one description, in the types of blocks and in tensors; nothing changes one once it is made."""
    shapes: dict[Any, tuple[Any, int]] = {}
    names: dict[Any, str] = {}
    extents: dict[Any, tuple[Any, Any]] = {}
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        plain = tuple([extent.value if type(extent) is core.constexpr else extent for extent in shape])
        key = plain, tuple(map(type, plain))
        found, name = shapes.get(key), names.get((element_ty.name, key))
        if found is None or name is None:
            make_type(self, element_ty, shape)
            shapes.setdefault(key, (self.shape, self.numel))
            names[element_ty.name, key] = self.name
            self.shape = shapes[key][0]
            return
        self.element_ty, self.name = element_ty, name
        self.shape, self.numel = found

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        found = extents.get(key)
        if found is None:
            make_tensor(self, handle, type)
            extents[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _compare_at_once(core: Any) -> None:
    """A type equals itself; of what is no constant there is nothing to unwrap."""
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}

    def unwrapped(value: Any) -> Any:
        if type(value) in plain:
            return value
        return value.value if type(value) is core.constexpr else unwrap(value)

    def equal_types(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    core._unwrap_if_constexpr, core.dtype.__eq__ = unwrapped, equal_types


def _skip_conversions(interpreter: Any, core: Any) -> None:
    """Two tensors of one of these dtypes, or one and a number that it holds, need no common dtype to be found, two blocks of one shape (or
    two scalars) no common shape."""
    semantic = type(interpreter.interpreter_semantic)
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    dtypes = {"fp32": (int, float), "int32": (int,), "int64": (int,)}

    def holds(dtype: Any, number: Any) -> bool:
        return type(number) in dtypes[dtype.name] and -(2**31) <= number < 2**31

    def operands(
        self: Any, lhs: Any, rhs: Any, lhs_ptr: bool = False, rhs_ptr: bool = False, arithmetic_check: bool = True, div_or_mod: bool = False
    ) -> tuple[Any, Any]:
        if type(lhs) is core.tensor and lhs.dtype.name in dtypes:
            if type(rhs) is core.tensor:
                if rhs.dtype.name == lhs.dtype.name:
                    return shaped(self, lhs, rhs)
            elif arithmetic_check and holds(lhs.dtype, rhs):
                return shaped(self, lhs, self.scalar_constant(rhs, dtype=lhs.dtype))
        elif type(rhs) is core.tensor and rhs.dtype.name in dtypes and arithmetic_check and holds(rhs.dtype, lhs):
            return shaped(self, self.scalar_constant(lhs, dtype=rhs.dtype), rhs)
        return check(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic_check, div_or_mod)  # type: ignore[no-any-return]

    def shaped(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not rhs.type.is_block():
            return lhs, filled(self, rhs, lhs.type)
        if not lhs.type.is_block():
            return filled(self, lhs, rhs.type), rhs
        return broadcast(self, lhs, rhs)  # type: ignore[no-any-return]

    def filled(self: Any, scalar: Any, like: Any) -> Any:
        kind = like.with_element_ty(scalar.dtype)
        return self.tensor(self.builder.create_splat(kind, scalar.handle), kind)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = operands, shaped
