"""Reading installed packages: parameters without an import, single files without their package, Triton's mode."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attnmatrix.cases.case import AttentionKind
from attnmatrix.harness.installed import installed_file
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.signature import has_parameter, parameters

needs_conch = pytest.mark.skipif(bool(find_row("conch", AttentionKind.SOFTMAX).missing), reason="conch is not installed")
FILE, FUNCTION = "ops/attention/paged_attention.py", "paged_attention"


@needs_conch
def test_parameters_are_read_from_source() -> None:
    assert {"query", "block_table", "softcap"} <= set(parameters("conch-triton-kernels", FILE, FUNCTION))
    assert has_parameter("conch-triton-kernels", FILE, FUNCTION, "^soft")
    assert not has_parameter("conch-triton-kernels", FILE, FUNCTION, "window|sink")


@needs_conch
def test_what_is_not_there_is_named() -> None:
    with pytest.raises(LookupError, match="no function 'flash'"):
        parameters("conch-triton-kernels", FILE, "flash")
    with pytest.raises(LookupError, match=r"0 files nothing\.py"):
        installed_file("conch-triton-kernels", "nothing.py")
    with pytest.raises(LookupError, match="no-such-distribution is not installed"):
        installed_file("no-such-distribution", FILE)


def test_listing_rows_imports_no_package() -> None:
    code = "import sys; from attnmatrix.harness.registry import rows; rows(); print([m for m in ('torch', 'triton', 'conch', 'sglang') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


MODES = """
import sys, torch
import attnmatrix.harness.interpreter as interpreter
{before}
interpreter.prepare_triton(torch.device("{device}"), interpreted={interpreted})
import os; print(os.environ.get("TRITON_INTERPRET"))
"""


@pytest.mark.parametrize(
    ("before", "device", "interpreted", "expected"),
    [
        ("", "cpu", True, "1"),
        ("torch.cuda.is_available = lambda: False", "cpu", False, "1"),
        ("torch.cuda.is_available = lambda: True", "cpu", False, "None"),
        ("", "cuda", True, "None"),
        ("sys.modules['triton'] = None", "cpu", True, "set TRITON_INTERPRET=1"),
        ("import os; os.environ['TRITON_INTERPRET'] = '1'", "cuda", True, "unset TRITON_INTERPRET"),
    ],
)
def test_triton_is_interpreted_on_a_cpu_only(before: str, device: str, interpreted: bool, expected: str) -> None:
    code = MODES.format(before=before, device=device, interpreted=interpreted)
    environment = {"PATH": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert expected in (run.stdout + run.stderr)
