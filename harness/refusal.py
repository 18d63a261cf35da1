"""Whose exception it is: a package's refusal counts, a row's own ``raise`` does not."""

from __future__ import annotations

import dis
import importlib.metadata
import inspect
import re
from pathlib import Path
from types import TracebackType

from attnmatrix.harness.capabilities import Blocked
from attnmatrix.harness.registry import Row


def why_not_a_refusal(error: BaseException, claim: Blocked, row: Row) -> str | None:
    """None when ``error`` is the declared refusal of one of the row's packages, else what is wrong with it.

    The innermost frame must lie in a distribution of the row, or be a call out of the row's file into compiled code: a frame
    whose current instruction is anything else, a ``raise`` or a generator that an exception was thrown into, is the row's
    own. Type (by class name, along the MRO) and text must match.
    """
    names = [kind.__name__ for kind in type(error).__mro__]
    if claim.exception not in names:
        return f"expected {claim.exception}, the package raised {type(error).__name__}: {error}"
    if not re.search(claim.match, str(error)):
        return f"expected a message matching {claim.match!r}, got {error}"
    frame = _innermost(error.__traceback__)
    if frame is None:
        return "the exception has no traceback"
    file = Path(frame.tb_frame.f_code.co_filename)
    if any(_belongs(file, name) for name in row.distributions):
        return None
    if file in [Path(source) for source in (row.source, *row.more_sources)] and _is_call(frame) and not _checked(error):
        return None
    return f"the exception was raised in {file.name}, line {frame.tb_lineno}, not by {' or '.join(row.distributions)}"


_COMPILED = (".cu", ".cuh", ".cc", ".cpp", ".h", ".hpp", ".pxi", ".pyx")
"""Files of compiled code: apache-tvm-ffi appends its C++ frames to a traceback, Cython its own."""
_CANNOT_RAISE = ("RESUME", "LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT", "RETURN_VALUE")
"""Instructions that a frame made for a traceback is at: one of the first two of ``PyCode_NewEmpty``'s code, or the last of an expression."""


def _innermost(traceback: TracebackType | None) -> TracebackType | None:
    """The Python frame that raised, or called the compiled code that did; ``torch._check`` and its kin only raise for their caller."""
    frames: list[TracebackType] = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    while frames and _is_compiled(frames[-1]):
        frames.pop()
    while frames and _is_check_helper(frames[-1]):
        frames.pop()
    return frames[-1] if frames else None


def _checked(error: BaseException) -> bool:
    """Whether a check helper raised for its caller."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and _is_check_helper(traceback)


def _is_compiled(frame: TracebackType) -> bool:
    """A frame that only names a place in compiled code, for nothing was raised in it: it is at no instruction that can raise.

    Cython's never ran: their code is ``PyCode_NewEmpty``'s, which would raise an AssertionError if it did. Those of apache-tvm-ffi
    returned long ago. A generator that an exception is thrown into may look the same and is neither.
    """
    code = frame.tb_frame.f_code
    named = Path(code.co_filename).suffix in _COMPILED or code.co_filename == "<unknown>"
    thrown_into = code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
    return named and not thrown_into and (frame.tb_lasti < 0 or _instruction(frame) in _CANNOT_RAISE)


def _is_check_helper(frame: TracebackType) -> bool:
    code = frame.tb_frame.f_code
    return code.co_name.startswith("_check") and Path(code.co_filename).parts[-2:] == ("torch", "__init__.py")


def _is_call(frame: TracebackType) -> bool:
    """Whether the frame was calling something that has no Python frame."""
    return _instruction(frame).startswith("CALL")


def _instruction(frame: TracebackType) -> str:
    """Name of the instruction that a frame is at, empty when there is none."""
    return next((i.opname for i in dis.get_instructions(frame.tb_frame.f_code) if i.offset == frame.tb_lasti), "")


def _belongs(file: Path, distribution: str) -> bool:
    """Whether a source file is one of a distribution's installed files."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return False
    sources = [(Path(str(entry.locate())), len(entry.parts)) for entry in files if entry.suffix == ".py" and ".." not in entry.parts]
    modules = {path for path, depth in sources if depth == 1}
    packages = {path.parents[depth - 2] for path, depth in sources if depth > 1}
    return file in modules or not packages.isdisjoint(file.parents)
