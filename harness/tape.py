"""The CPU tape: what a CUDA graph does to a backend, without a GPU.

During capture every dispatched operator and every interpreted Triton launch is recorded with its arguments; a replay runs
them again on the same storages. Everything computed in Python at capture is therefore frozen. Reading a tensor on the host is
refused as CUDA refuses it, and so is making one of host data, which CUDA would have to copy from unpinned memory; a list or an
array without a device is taken for one that is meant for the GPU. Not seen: work that reaches memory past both the dispatcher
and Triton (ctypes, numpy views made before capture, ``torch.frombuffer``), and copies of host tensors that were made before the
capture, which look like any other copy on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class CaptureError(RuntimeError):
    """An operation that a CUDA graph cannot capture; the message names it."""


_HOST_READS = {
    getattr(torch.Tensor, name)
    for name in (
        "tolist", "cpu", "numpy", "item", "equal", "allclose", "is_nonzero", "pin_memory", "__array__", "__bool__", "__int__",
        "__float__", "__complex__", "__index__", "__contains__", "__format__", "__repr__",
    )
} | {torch.equal, torch.allclose, torch.is_nonzero}  # fmt: skip
_FROM_HOST_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_ALWAYS_READ = {torch.ops.aten.equal.default, torch.ops.aten.allclose.default}
_MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class _Entry:
    """One recorded operation. ``results`` are the freshly allocated outputs, which a replay overwrites; None where the output
    is one of the arguments' own storages."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor | None, ...] = ()

    def replay(self) -> None:
        fresh = tree_leaves(self.run(*self.args, **self.kwargs))
        for old, new in zip(self.results, (leaf for leaf in fresh if isinstance(leaf, Tensor)), strict=bool(self.results)):
            if old is not None:
                old.copy_(new)


class Tape:
    """A graph of the harness (see :mod:`attnmatrix.harness.graphs`) that runs while it records."""

    kind = "tape"

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._modes: ExitStack | None = None
        self._inside = 0

    def begin(self) -> None:
        with ExitStack() as modes:
            if "torch._dynamo" in sys.modules:  # compiled code would pass the dispatcher by
                modes.enter_context(torch.compiler.set_stance("force_eager"))
            modes.enter_context(_launches_on(self))
            modes.enter_context(_RefuseHostReads(self))
            modes.enter_context(_RecordOperators(self))
            self._modes = modes.pop_all()

    def end(self) -> None:
        assert self._modes is not None, "end without begin"
        self._modes.close()
        self._modes = None

    abort = end

    def replay(self) -> None:
        for entry in self._entries:
            entry.replay()

    def __len__(self) -> int:
        """Recorded operations."""
        return len(self._entries)

    @property
    def listening(self) -> bool:
        """False while a recorded operation runs: what happens inside it is not recorded again."""
        return not self._inside

    @contextmanager
    def one_entry(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and record it, unless it only made views."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fixed_args, fixed_kwargs = tree_map(_pinned, (args, kwargs))
        with self.one_entry():
            outputs = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        owned = {_storage(tensor) for tensor in given}
        results = tuple(None if _storage(tensor) in owned else _pinned(tensor) for tensor in made)
        mutates = getattr(getattr(func, "_schema", None), "is_mutable", True)
        if mutates or any(result is not None for result in results):
            self._entries.append(_Entry(func, fixed_args, fixed_kwargs, results))
        return outputs

    def launch(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one interpreted Triton launch and record it whole."""
        fixed_args, fixed_kwargs = tree_map(_pinned, (args, kwargs))
        self._entries.append(_Entry(run, fixed_args, fixed_kwargs))
        with self.one_entry():
            return run(*args, **kwargs)


def _pinned(value: Any) -> Any:
    """A tensor's memory under a name of its own: a graph keeps its pointers when the tensor is set to other memory."""
    return value.detach() if isinstance(value, Tensor) else value


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _RecordOperators(TorchDispatchMode):
    """Records operators; the insides of those that are written in Python, FlexAttention among them."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: keeping dynamo from tracing this class would import it, which takes a second; nothing is traced meanwhile."""
        return False

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not self._tape.listening:
            return func(*args, **kwargs)
        if _data_dependent(func, args, kwargs):
            raise CaptureError(f"{func} reads a tensor's values on the host, which a graph cannot capture")
        if func is torch.ops.aten.lift_fresh.default and args[0].dim() and args[0].numel():  # a host number may stay on the host
            raise CaptureError(f"a new tensor {tuple(args[0].shape)} copies host data to the device, which a graph cannot capture")
        body = _python_body(func)
        if body is not None:
            with self, _RefuseHostReads(self._tape, eager=_stands_in(func)):  # neither is in force while torch handles the operator
                return body(*args, **kwargs)
        return self._tape.operator(func, args, kwargs)


class _RefuseHostReads(TorchFunctionMode):
    """Refuses the reads and copies that never reach the dispatcher; ``eager`` allows tensors of one number, which compiled code
    has as constants."""

    def __init__(self, tape: Tape, eager: bool = False) -> None:
        super().__init__()
        self._tape, self._eager = tape, eager

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._tape.listening and _reads_on_host(func, args, kwargs):
            raise CaptureError(f"{getattr(func, '__name__', func)} reads a tensor's values on the host, which a graph cannot capture")
        if self._tape.listening and not self._eager and _copies_a_number(func, args, kwargs):
            raise CaptureError(f"{func.__name__} copies host data to the device, which a graph cannot capture")
        return func(*args, **kwargs)


def _reads_on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is torch.Tensor.to:
        return "cpu" in (*(arg for arg in args[1:] if isinstance(arg, str)), kwargs.get("device"))
    if func in _FROM_HOST_DATA:
        data = _data(func, args, kwargs)
        return not isinstance(data, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(data))
    return func in _HOST_READS


def _copies_a_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a number of the host is to become a tensor on a device; without a device it stays on the host."""
    placed = func is torch.Tensor.new_tensor or kwargs.get("device") is not None
    return func in _FROM_HOST_DATA and placed and not isinstance(_data(func, args, kwargs), (Tensor, list, tuple))


def _data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of ``_FROM_HOST_DATA`` is given, whether by place or by name."""
    given = args[1:] if func is torch.Tensor.new_tensor else args
    return given[0] if given else kwargs.get("data", kwargs.get("obj"))


def _data_dependent(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether CUDA must copy values to the host to run ``func``: for its result, or for the result's shape."""
    if func in _ALWAYS_READ:
        return True
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func is torch.ops.aten.index.Tensor:
        return _indexes_by_mask(args[1])
    if func in (torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default):
        return _indexes_by_mask(args[1]) and args[2].dim() > 0  # a mask and a scalar become a masked fill
    tags = getattr(func, "tags", ())
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _indexes_by_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in _MASKS for index in indices)


def _stands_in(func: Any) -> bool:
    """Whether the Python body runs on a CPU only, in place of code that is compiled for a GPU."""
    return isinstance(func, torch._ops.HigherOrderOperator)


def _python_body(func: Any) -> Callable[..., Any] | None:
    """The Python function behind FlexAttention or an operator made with ``torch.library.custom_op``: its insides are captured,
    not itself, for the Python in it does not run again at replay."""
    if _stands_in(func):
        return func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    definitions = getattr(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
    definition = definitions.get(func.name().split(".")[0]) if isinstance(func, torch._ops.OpOverload) else None
    if definition is None:
        return None
    bodies = definition._backend_fns
    return bodies.get("cpu") or bodies.get(None)


@contextmanager
def _launches_on(tape: Tape) -> Iterator[None]:
    """Within the block launches of the Triton interpreter, if it is loaded at all, go to the tape."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    executor = interpreter.GridExecutor
    launch = executor.__call__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not tape.listening:
            return launch(self, *args, **kwargs)
        return tape.launch(launch.__get__(self), args, kwargs)

    executor.__call__ = recorded
    try:
        yield
    finally:
        executor.__call__ = launch
