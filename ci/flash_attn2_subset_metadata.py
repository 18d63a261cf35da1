"""Say what a partial source build of flash-attn is: write the metadata of an installed distribution beside its Python files.

A build put on PYTHONPATH has no metadata, so nothing could tell which release it is or that head dims are missing. The version gets a local
part that names the head dims that were built, such as ``2.8.3+local-subset.64.128``; the row ``fa2`` claims those only.

usage: python ci/flash_attn2_subset_metadata.py SOURCE_DIR HEAD_DIM...   (SOURCE_DIR is on PYTHONPATH and holds ``flash_attn/``)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

KERNEL_DIMS = (32, 64, 96, 128, 192, 256)


def write_metadata(source: Path, dims: tuple[int, ...]) -> Path:
    """Write ``flash_attn-VERSION.dist-info`` into ``source``; returns it. Older ones there are replaced.

    Raises ValueError when ``source`` is no flash-attn tree or a head dim has no kernel.
    """
    init = source / "flash_attn" / "__init__.py"
    found = re.search(r'^__version__ = "([^"]+)"', init.read_text(), re.MULTILINE) if init.is_file() else None
    if found is None:
        raise ValueError(f"{source} has no flash_attn/__init__.py that states a version")
    wrong = [dim for dim in dims if dim not in KERNEL_DIMS]
    if wrong or not dims:
        raise ValueError(f"head dims are of {KERNEL_DIMS}, got {list(dims)}")
    version = f"{found.group(1)}+local-subset.{'.'.join(str(dim) for dim in sorted(dims))}"
    for old in source.glob("flash_attn-*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    info = source / f"flash_attn-{version}.dist-info"
    info.mkdir()
    files = sorted(path for path in (source / "flash_attn").rglob("*.py") if path.relative_to(source).parts[1] != "cute")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {version}\n")
    (info / "INSTALLER").write_text("source build\n")
    names = [path.relative_to(source).as_posix() for path in (*files, info / "METADATA", info / "INSTALLER", info / "RECORD")]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    return info


if __name__ == "__main__":
    try:
        print(write_metadata(Path(sys.argv[1]), tuple(int(dim) for dim in sys.argv[2:])))
    except (IndexError, ValueError) as error:
        sys.exit(f"{error}\n{__doc__}")
