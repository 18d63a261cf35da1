"""A refusal counts when the package raised it; whatever a row raises itself, by whichever route, does not."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from attnmatrix.cases.case import AttentionKind
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.capabilities import Blocked
from attnmatrix.harness.context import Context
from attnmatrix.harness.refusal import why_not_a_refusal
from attnmatrix.harness.registry import Row

CLAIM = Blocked("head dim too small", "ValueError", r"head_dim must be at least \d+")
MESSAGE = "head_dim must be at least 128"

PACKAGE = f'''
class HeadDimError(ValueError):
    pass

def kernel(head_dim):
    _check(head_dim)

def _check(head_dim):
    if head_dim < 128:
        raise ValueError("{MESSAGE}")

def asserting():
    assert False, "{MESSAGE}"

def subclass():
    raise HeadDimError("{MESSAGE}")

def other_type():
    raise IndexError("{MESSAGE}")

def other_text():
    raise ValueError("page size must be a multiple of 256")

def call_back(function):
    function()

def in_cpp():
    import sys, types
    frame = eval(compile("getframe()", "src/kernel.cu", "eval"), {{"getframe": sys._getframe}})
    raise ValueError("{MESSAGE}").with_traceback(types.TracebackType(None, frame, frame.f_lasti, 1))

def in_cython():
    """What Cython's ``__Pyx_AddTraceback`` does: an empty code object, a frame that never runs."""
    import ctypes, types
    from ctypes import c_char_p, c_int, c_void_p, py_object
    api = ctypes.pythonapi
    new_code = ctypes.PYFUNCTYPE(py_object, c_char_p, c_char_p, c_int)(("PyCode_NewEmpty", api))
    new_frame = ctypes.PYFUNCTYPE(py_object, c_void_p, py_object, py_object, c_void_p)(("PyFrame_New", api))
    state = ctypes.PYFUNCTYPE(c_void_p)(("PyThreadState_Get", api))()
    frame = new_frame(state, new_code(b"python/ffi/cython/function.pxi", b"__call__", 906), {{}}, None)
    raise ValueError("{MESSAGE}").with_traceback(types.TracebackType(None, frame, frame.f_lasti, 906))
'''

ROW = f'''
import fake_attention
import fake_attention_single
import other_package

def refuse():
    fake_attention.kernel(64)

def refuse_in_a_single_module():
    fake_attention_single.kernel(64)

def refuse_and_reraise():
    try:
        fake_attention.kernel(64)
    except ValueError:
        raise

def asserting():
    fake_attention.asserting()

def subclass():
    fake_attention.subclass()

def other_type():
    fake_attention.other_type()

def other_text():
    fake_attention.other_text()

def refuse_in_cpp():
    fake_attention.in_cpp()

def refuse_in_cython():
    fake_attention.in_cython()

def refuse_in_compiled_code():
    int("{MESSAGE}", 10)

def raise_itself():
    raise ValueError("{MESSAGE}")

def raise_in_a_helper():
    raise_itself()

def raise_in_exec():
    exec("raise ValueError('{MESSAGE}')")

def raise_in_exec_named_like_cpp():
    exec(compile("raise ValueError('{MESSAGE}')", "src/kernel.cu", "exec"))

def raise_in_exec_named_like_cython():
    exec(compile("raise ValueError('{MESSAGE}')", "function.pxi", "exec"))

def raise_without_a_raise_named_like_cython():
    eval(compile("thrown.throw(ValueError('{MESSAGE}'))", "function.pxi", "eval"), {{"thrown": (_ for _ in ())}})

def raise_in_a_generator_named_like_cython():
    space = {{}}
    exec(compile("def waiting():\\n    yield\\n", "function.pxi", "exec"), space)
    space["waiting"]().throw(ValueError("{MESSAGE}"))

def raise_in_a_started_generator_named_like_cython():
    space = {{}}
    exec(compile("def waiting():\\n    yield\\n", "function.pxi", "exec"), space)
    started = space["waiting"]()
    next(started)
    started.throw(ValueError("{MESSAGE}"))

def raise_after_the_package_refused():
    try:
        fake_attention.kernel(64)
    except ValueError as error:
        raise ValueError(str(error)) from error

def raise_by_throwing_into_a_generator():
    (_ for _ in ()).throw(ValueError("{MESSAGE}"))

def raise_by_throwing_into_a_started_generator():
    def waiting():
        yield
    generator = waiting()
    next(generator)
    generator.throw(ValueError("{MESSAGE}"))

def raise_through_a_future():
    from concurrent.futures import Future
    future = Future()
    future.set_exception(ValueError("{MESSAGE}"))
    future.result()

def raise_in_another_package():
    other_package.kernel(64)

def raise_in_a_call_back():
    fake_attention.call_back(raise_itself)

def raise_by_assert():
    assert False, "{MESSAGE}"
'''


def install(site: Path, distribution: str, files: dict[str, str]) -> None:
    """A distribution as pip leaves it: its files, and a dist-info with METADATA and RECORD."""
    info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    for name, text in files.items():
        site.joinpath(name).parent.mkdir(exist_ok=True)
        site.joinpath(name).write_text(text)
    names = [*files, f"{info.name}/METADATA", f"{info.name}/RECORD"]
    info.joinpath("RECORD").write_text("".join(f"{name},,\n" for name in names))


@pytest.fixture
def row_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    site, rows = tmp_path / "site", tmp_path / "rows"
    site.mkdir()
    rows.mkdir()
    install(site, "fake-attention", {"fake_attention/__init__.py": "from fake_attention.core import *", "fake_attention/core.py": PACKAGE})
    install(site, "fake-attention-single", {"fake_attention_single.py": PACKAGE})
    install(site, "other-package", {"other_package/__init__.py": PACKAGE})
    rows.joinpath("row_under_test.py").write_text(ROW)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(rows))
    importlib.invalidate_caches()
    before = set(sys.modules)
    yield importlib.import_module("row_under_test")
    for name in set(sys.modules) - before:
        del sys.modules[name]


def create(context: Context) -> AttentionBackend:
    raise AssertionError("never called")


def problem_of(function: Callable[[], None], row_file: ModuleType, claim: Blocked = CLAIM) -> str | None:
    row = Row(
        "fake", AttentionKind.SOFTMAX, create, distributions=("fake-attention", "fake-attention-single"), source=str(row_file.__file__)
    )
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what is raised is what is judged
        function()
    return why_not_a_refusal(caught.value, claim, row)


@pytest.mark.parametrize(
    "name", ["refuse", "refuse_in_a_single_module", "refuse_and_reraise", "subclass", "refuse_in_cpp", "refuse_in_cython"]
)
def test_the_packages_exception_is_a_refusal(name: str, row_file: ModuleType) -> None:
    assert problem_of(getattr(row_file, name), row_file) is None


def test_a_declared_assert_of_the_package_is_a_refusal(row_file: ModuleType) -> None:
    claim = Blocked("head dim too small", "AssertionError", r"head_dim must be at least \d+")
    assert problem_of(row_file.asserting, row_file, claim) is None
    assert problem_of(row_file.raise_by_assert, row_file, claim) is not None


def test_compiled_code_called_from_the_row_is_a_refusal(row_file: ModuleType) -> None:
    claim = Blocked("not a number", "ValueError", "invalid literal")
    assert problem_of(row_file.refuse_in_compiled_code, row_file, claim) is None


@pytest.mark.parametrize("name", [line[4:-3] for line in ROW.splitlines() if line.startswith("def raise_") and "assert" not in line])
def test_a_rows_own_exception_is_not(name: str, row_file: ModuleType) -> None:
    problem = problem_of(getattr(row_file, name), row_file)
    assert problem is not None
    assert "not by fake-attention" in problem


def test_another_type_is_not(row_file: ModuleType) -> None:
    problem = problem_of(row_file.other_type, row_file)
    assert problem == f"expected ValueError, the package raised IndexError: {MESSAGE}"


def test_another_text_is_not(row_file: ModuleType) -> None:
    problem = problem_of(row_file.other_text, row_file)
    assert problem is not None
    assert "expected a message matching" in problem
    assert "multiple of 256" in problem


def test_an_exception_without_traceback_is_not(row_file: ModuleType) -> None:
    row = Row("fake", AttentionKind.SOFTMAX, create, distributions=("fake-attention",), source=str(row_file.__file__))
    assert why_not_a_refusal(ValueError(MESSAGE), CLAIM, row) == "the exception has no traceback"


def test_a_missing_package_refuses_nothing(row_file: ModuleType) -> None:
    row = Row("fake", AttentionKind.SOFTMAX, create, distributions=("not-installed-anywhere",), source=str(row_file.__file__))
    with pytest.raises(ValueError, match="head_dim") as caught:
        row_file.refuse()
    problem = why_not_a_refusal(caught.value, CLAIM, row)
    assert problem is not None
    assert "not by not-installed-anywhere" in problem


def test_the_other_side_of_a_pair_may_refuse_in_compiled_code(row_file: ModuleType) -> None:
    claim = Blocked("not a number", "ValueError", "invalid literal")
    pair = Row("a,b", AttentionKind.SOFTMAX, create, source="elsewhere.py", more_sources=(str(row_file.__file__),))
    with pytest.raises(ValueError, match="invalid literal") as caught:
        row_file.refuse_in_compiled_code()
    assert why_not_a_refusal(caught.value, claim, pair) is None


def test_a_check_helper_of_torch_does_not_launder_a_rows_own_raise(tmp_path: Path) -> None:
    source = tmp_path / "laundering_row.py"
    source.write_text(f'import torch\n\ndef refuse():\n    torch._check_value(False, lambda: "{MESSAGE}")\n')
    spec = importlib.util.spec_from_file_location("laundering_row", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    row = Row(name="laundering", kind=AttentionKind.SOFTMAX, create=_never, distributions=("torch",), source=str(source))
    with pytest.raises(ValueError, match="at least 128") as caught:
        module.refuse()
    assert why_not_a_refusal(caught.value, CLAIM, row)


def _never(context: Context) -> AttentionBackend:
    raise NotImplementedError
