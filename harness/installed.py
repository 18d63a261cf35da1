"""Files of installed distributions: found by name, loaded without the package around them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def installed_file(distribution: str, ending: str) -> Path:
    """The file of a distribution whose path ends in ``ending`` (``ops/attention/varlen_attention.py``).

    Raises LookupError when the distribution is absent or has not exactly one such file.
    """
    found = [path for name, path in _files(distribution) if name == ending or name.endswith(f"/{ending}")]
    if len(found) != 1:
        raise LookupError(f"the distribution {distribution} has {len(found)} files {ending}, expected one")
    return found[0]


@cache
def _files(distribution: str) -> tuple[tuple[str, Path], ...]:
    """Every file of a distribution, by its path in it. Raises LookupError when it is absent."""
    try:
        entries = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise LookupError(f"the distribution {distribution} is not installed") from None
    return tuple((entry.as_posix(), Path(str(entry.locate()))) for entry in entries)


def load_file(distribution: str, ending: str) -> ModuleType:
    """Import one file of a distribution on its own, for kernels whose package needs far more than they do."""
    path = installed_file(distribution, ending)
    name = f"{distribution}:{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # a dataclass in the file looks its module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
