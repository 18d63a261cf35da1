"""mypy over the four packages under their installed names, which the source tree does not spell out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKS = ROOT / "build" / "typecheck" / "attnmatrix"


def main() -> int:
    LINKS.mkdir(parents=True, exist_ok=True)
    for name in ("cases", "references", "harness", "matrix"):
        link = LINKS / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name)
    return subprocess.call([sys.executable, "-m", "mypy", "-p", "attnmatrix"], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
