"""Which code a verdict depends on, as one hash: records judged by other code are stale."""

from __future__ import annotations

import functools
import hashlib
import io
import sys
import token
import tokenize
from pathlib import Path

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.modes import RunnerMode

TOP = Path(__file__).resolve().parent.parent
_CASES = ("case", "handoff", "modes", "options", "placement", "schedule", "story")
_REFERENCES = {AttentionKind.SOFTMAX: ("softmax", "visibility", "slopes"), AttentionKind.LIGHTNING: ("decayed_state", "slopes")}
INTERPRETER = ("interpreter", "quick_interpreter", "quick_memory", "quick_operators", "quick_tensors")
"""Files under ``harness/`` that count for the rows that are interpreted on a CPU."""
ROUNDING = {
    AttentionKind.SOFTMAX: ("rounding", "softmax_rounding", "flash_rounding", "online_softmax"),
    AttentionKind.LIGHTNING: ("rounding", "decay_rounding", "chunk_products"),
}
"""Those that count for the rows that name a rounding step."""
_APART = (
    *(
        "adapted_modes",
        "backend",
        "choose",
        "coverage",
        "hybrid",
        "lazy",
        "registry",
        "row_check",
        "row_suite",
    ),  # say what is run, not how it is judged
    *("diagnose", "forced", "locate", "matching"),  # explain a verdict that stands
    *("draft_masks", "sglang_engine", "wheel_modules"),  # count for the rows that name them among their sources
    *INTERPRETER,
    *(name for names in ROUNDING.values() for name in names),
)
_RUNNERS = {
    RunnerMode.EAGER: ("eager",),
    RunnerMode.VERIFY: ("eager",),
    RunnerMode.CG_DECODE: ("decode_graph",),
    RunnerMode.VERIFY_CG: ("decode_graph",),
    RunnerMode.PCG_EXTEND: ("piecewise",),
    RunnerMode.BCG_EXTEND: ("breakable",),
    RunnerMode.HANDOFF: ("handoff",),
}


@functools.cache
def fingerprint(kind: AttentionKind, mode: RunnerMode, sources: tuple[str, ...]) -> str:
    """Hash over the tokens of the case, reference, runner, judgement and row files of one cell.

    ``sources`` are the row's own files. Comments, docstrings and layout do not count; equal on Python 3.10 to 3.13.
    """
    files = [TOP / "cases" / f"{name}.py" for name in _CASES]
    files += [TOP / "references" / f"{name}.py" for name in _REFERENCES.get(kind, ())]
    files += [file for file in sorted((TOP / "harness").glob("*.py")) if file.stem not in _APART]
    files += [TOP / "harness" / "runners" / f"{name}.py" for name in ("recorder", *_RUNNERS.get(mode, ()))]
    digest = hashlib.sha256()
    for file in [*files, *map(Path, sources)]:
        digest.update(file.name.encode() + b"\0" + _file_tokens(file) + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def _file_tokens(file: Path) -> bytes:
    return token_text(file.read_text()).encode() if file.is_file() else b"absent"


_LAYOUT = (token.NEWLINE, token.INDENT, token.DEDENT)
_DROPPED = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, token.ENDMARKER)


def token_text(source: str) -> str:
    """The significant tokens of a source text, separated by spaces; f-strings as written, on every Python."""
    lines = source.splitlines(keepends=True)
    words: list[str] = []
    line_start = True
    pending = ""
    depth, opened = 0, (0, 0)
    for tok in tokenize.generate_tokens(io.StringIO(source).readline):
        kind, text = tok.type, tok.string
        if sys.version_info >= (3, 12):
            if kind == token.FSTRING_START:
                opened = tok.start if depth == 0 else opened
                depth += 1
            if kind == token.FSTRING_END:
                depth -= 1
                if depth == 0:
                    kind, text = token.STRING, _between(lines, opened, tok.end)
            if depth:
                continue
        if kind in _DROPPED:
            continue
        docstring_ends = bool(pending) and kind == token.NEWLINE
        if pending and not docstring_ends:
            words.append(pending)
        pending = ""
        if docstring_ends:
            line_start = True
            continue
        if kind == token.STRING and line_start and not text.lower().startswith("f"):
            pending = text  # a docstring, unless the line goes on
        elif kind in _LAYOUT:
            words.append({token.NEWLINE: "\n", token.INDENT: ">", token.DEDENT: "<"}[kind])
        else:
            words.append(text)
        line_start = kind in _LAYOUT
    return " ".join(words)


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    middle = lines[start[0] : end[0] - 1]
    return lines[start[0] - 1][start[1] :] + "".join(middle) + lines[end[0] - 1][: end[1]]
