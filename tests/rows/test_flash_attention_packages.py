"""What tells the FlashAttention distributions apart: the metadata of a partial build, and two packages under one import name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from attnmatrix.harness.backends import fa2

SCRIPT = Path(__file__).resolve().parents[2] / "ci" / "flash_attn2_subset_metadata.py"


def tree(tmp_path: Path) -> Path:
    package = tmp_path / "flash_attn-2.8.3" / "flash_attn"
    (package / "cute").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "2.8.3"\n')
    (package / "flash_attn_interface.py").write_text("def flash_attn_varlen_func(q, k, v, block_table=None): ...\n")
    (package / "cute" / "__init__.py").write_text("")
    (package / "cute" / "interface.py").write_text("old = True\n")
    return package.parent


def run(code: str, *paths: Path) -> str:
    environment = {"PYTHONPATH": ":".join(map(str, paths))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_partial_build_states_its_release_and_head_dims(tmp_path: Path) -> None:
    source = tree(tmp_path)
    for _ in range(2):  # the second run replaces what the first wrote
        subprocess.run([sys.executable, str(SCRIPT), str(source), "128", "64"], check=True, capture_output=True)
    code = """
from importlib.metadata import version
from attnmatrix.harness.backends import fa2
from attnmatrix.harness.signature import parameters
from attnmatrix.harness.registry import find_row
from attnmatrix.cases.case import AttentionKind
row = find_row("fa2", AttentionKind.SOFTMAX)
print(version("flash-attn"), fa2.built_dims(version("flash-attn")), row.missing, parameters(fa2.PACKAGE, fa2.INTERFACE, "flash_attn_varlen_func"))
"""
    assert run(code, source) == "2.8.3+local-subset.64.128 (64, 128) () ('q', 'k', 'v', 'block_table')"


@pytest.mark.parametrize(("arguments", "message"), [(["40"], "head dims are of"), ([], "head dims are of")])
def test_a_head_dim_without_a_kernel_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tree(tmp_path)), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert message in done.stderr


def test_the_script_knows_the_head_dims_of_the_row() -> None:
    spec = importlib.util.spec_from_file_location("flash_attn2_subset_metadata", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.KERNEL_DIMS == fa2.KERNEL_DIMS


LOAD = "from attnmatrix.harness.backends import fa2, fa4; {before}; print(fa4.load().new); print(hasattr(fa2.load(), 'flash_attn_varlen_func'))"


@pytest.mark.parametrize("before", ["pass", "fa2.load()"], ids=["fa4 first", "fa2 first"])
@pytest.mark.parametrize("fa2_first_on_path", [True, False])
def test_the_newer_cute_is_loaded_beside_the_older_package(tmp_path: Path, before: str, fa2_first_on_path: bool) -> None:
    source = tree(tmp_path)
    newer = tmp_path / "site"
    (newer / "flash_attn" / "cute").mkdir(parents=True)
    (newer / "flash_attn" / "cute" / "__init__.py").write_text("")
    (newer / "flash_attn" / "cute" / "interface.py").write_text("new = True\n")
    info = newer / "flash_attn_4-4.0.0b36.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n")
    (info / "RECORD").write_text("flash_attn/cute/__init__.py,,\nflash_attn/cute/interface.py,,\n")
    paths = (source, newer) if fa2_first_on_path else (newer, source)
    assert run(LOAD.format(before=before), *paths) == "True\nTrue"


def test_another_cute_that_was_imported_before_is_an_error(tmp_path: Path) -> None:
    source = tree(tmp_path)
    newer = tmp_path / "site"
    (newer / "flash_attn" / "cute").mkdir(parents=True)
    (newer / "flash_attn" / "cute" / "interface.py").write_text("new = True\n")
    info = newer / "flash_attn_4-4.0.0b36.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n")
    (info / "RECORD").write_text("flash_attn/cute/interface.py,,\n")
    code = """
import flash_attn.cute.interface
from attnmatrix.harness.backends import fa4
try:
    fa4.load()
except ImportError as error:
    print(str(error)[:50])
"""
    assert run(code, source, newer) == "flash_attn.cute.interface was imported from " + str(source)[:6]
