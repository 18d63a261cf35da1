"""Typing a case id back: the inverse of ``Case.id``."""

from __future__ import annotations

import re

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads, Placement, Scratch
from attnmatrix.cases.options import DRAFT_KINDS, DTYPES, parse_trees
from attnmatrix.cases.validity import MOST_REQUESTS

SHOWN = 300  # characters of a wrong id that are repeated to the user


class _TooMany(ValueError):
    """More requests than any case has, told before they are written out."""


def _parse_lens(text: str) -> tuple[int, ...]:
    lens: list[int] = []
    for part in text.split(".") if text else []:
        value, _, count = part.partition("x")
        if int(count or 1) > MOST_REQUESTS:
            raise _TooMany(f"more than {MOST_REQUESTS} requests")
        lens += [int(value)] * int(count or 1)
    return tuple(lens)


_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_OPTIONS: tuple[tuple[str, str], ...] = (
    (r"p(\d+)", "page_size"),
    (r"prefix([\dx.]*)", "prefix_lens"),
    (r"new([\dx.]*)", "new_lens"),
    (r"h(\d+x\d+x\d+)", "heads"),
    (r"scratch(first|none)", "scratch"),
    (r"w(\d+)", "window"),
    (r"w(first)", "window_layers"),
    (rf"cap({_NUMBER})", "soft_cap"),
    (r"tree([r\d._]*)", "trees"),
    (rf"gain({_NUMBER})", "gain"),
    (rf"drop({_NUMBER})", "score_drop"),
    (rf"state({_NUMBER})", "state_scale"),
    (r"kv(\w+)", "kv_dtype"),
    (r"states([a-z]+\d+)", "state_dtype"),
    (r"track([\dx.]+)", "track_lens"),
    (r"shard(\d+of\d+)", "shard"),
    (r"spare(\d+)", "spare_pages"),
    (r"then([\w.]+)", "story"),
    (r"s(\d+)", "seed"),
)


def _parse_value(name: str, text: str) -> object:
    if name in ("page_size", "window", "spare_pages", "seed"):
        return int(text)
    if name in ("prefix_lens", "new_lens", "track_lens"):
        return _parse_lens(text)
    if name in ("soft_cap", "gain", "state_scale", "score_drop"):
        return float(text)
    if name == "shard":
        rank, ranks = text.split("of")
        return int(rank), int(ranks)
    if name == "heads":
        return Heads(*(int(n) for n in text.split("x")))
    if name == "trees":
        return parse_trees(text)
    return Scratch(text) if name == "scratch" else text


def _parse_word(word: str) -> tuple[str, object] | None:
    for name, enum in (("kind", AttentionKind), ("forward", ForwardMode), ("placement", Placement)):
        if word in [member.value for member in enum]:
            return name, enum(word)
    if word in DTYPES:
        return "dtype", word
    if word in DRAFT_KINDS:
        return "draft_kind", word
    if word in ("sinks", "alibi", "strided"):
        return word, True
    for pattern, name in _OPTIONS:
        match = re.fullmatch(pattern, word, re.ASCII)
        if match:
            return name, _parse_value(name, match.group(1))
    return None


def parse_case(text: str) -> Case:
    """Inverse of ``Case.id``. Raises ValueError naming the part that is not understood or missing."""
    shown = repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
    values: dict[str, object] = {}
    for word in re.split(r"(?<!\de)-", text):
        try:
            parsed = _parse_word(word)
        except _TooMany as error:
            raise ValueError(f"case id {shown}: part {word[:SHOWN]!r}: {error}") from error
        except ValueError:
            parsed = None
        if parsed is None:
            raise ValueError(f"unknown case id {shown}: part {word[:SHOWN]!r} is not understood")
        if parsed[0] in values:
            raise ValueError(f"unknown case id {shown}: {parsed[0]} is given twice")
        values[parsed[0]] = parsed[1]
    missing = [n for n in ("forward", "page_size", "prefix_lens", "new_lens", "heads", "dtype", "placement") if n not in values]
    if missing:
        raise ValueError(f"unknown case id {shown}: {', '.join(missing)} missing")
    return Case(**values)  # type: ignore[arg-type]
