"""What is wrong with a row's declaration: asked when it is registered, before anything runs or is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.options import DTYPES
from attnmatrix.harness.capabilities import Blocked, Capabilities, Claim, Conventions, KnownFault, NotApplicable

if TYPE_CHECKING:
    from attnmatrix.harness.registry import Row

_CLAIMS = ", ".join(kind.__name__ for kind in get_args(Claim))
DEVICES = ("cpu", "cuda")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def name_problem(name: object) -> str | None:
    """Why ``name`` cannot be typed as a backend (a comma makes a pair, a leading dash an option); None when it can."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return None
    return "a name is lower-case letters, digits, '-' and '_', and starts with a letter or digit"


def row_problem(row: Row) -> str | None:
    """The first rule that a row's declaration breaks, in words; None for a good one."""
    return next(_problems(row), None)


def claim_problem(row: Row, mode: RunnerMode, case: Case, device: str) -> str | None:
    """What is wrong with what a row answers about one cell, in words; None for a claim that can be checked.

    Whatever its functions raise or return is the row's mistake: a value that only looks true would exclude a case that nobody tried.
    """
    try:
        claim = row.capabilities.claim(mode, case, device)
        for fault in _known_faults(row):
            applies = fault.applies(case, mode)
            if not isinstance(applies, bool):
                return f"applies of the known fault {fault.finding!r} answers True or False, got {applies!r} for case {case.id}"
        checked = claim.check() if isinstance(claim, NotApplicable) else True
        if isinstance(claim, Blocked):
            re.compile(claim.match)
    except Exception as error:  # noqa: BLE001 - told in one line, with the case that it was asked about
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return f"why_not, a limit, a known fault or a check raised, asked about case {case.id}: {said}"
    if not isinstance(claim, get_args(Claim)):
        return f"why_not and the limits return {_CLAIMS} or None, got {claim!r} for case {case.id}"
    if not isinstance(checked, bool):
        return f"check of NotApplicable({claim.reason!r}) answers True or False, got {checked!r}"  # type: ignore[union-attr]
    return None


def _known_faults(row: Row) -> tuple[KnownFault, ...]:
    return row.capabilities.known_faults if isinstance(row.capabilities, Capabilities) else ()


def _problems(row: Row) -> Iterator[str]:
    problem = name_problem(row.name)
    if problem:
        yield problem
    if not isinstance(row.kind, AttentionKind):
        yield f"kind is an AttentionKind ({', '.join(kind.value for kind in AttentionKind)}), got {row.kind!r}"
    if not callable(row.create):
        yield f"create is called with a Context and builds the backend, got {row.create!r}"
    yield from _not_words("devices", row.devices, lambda word: word in DEVICES, f"one or both of {', '.join(DEVICES)}")
    yield from _not_words(
        "distributions", row.distributions, lambda word: bool(_DISTRIBUTION.fullmatch(word)), "names of packages to install"
    )
    if row.dtypes is not None:
        yield from _not_words("dtypes", row.dtypes, lambda word: word in DTYPES, f"some of {', '.join(DTYPES)}, or None for all")
    if (row.interpreted or row.slow_on_cpu or row.few_on_cpu) and "cpu" not in row.devices:
        yield "devices lacks 'cpu', and interpreted, slow_on_cpu and few_on_cpu say how a row runs there"
    for source in (row.source, *row.more_sources):
        if not isinstance(source, str) or not Path(source).is_file():
            yield f"source is the row's own file (source=__file__), by which evidence notices that it changed, got {source!r}"
    if not isinstance(row.conventions, Conventions):
        yield f"conventions is a Conventions(...), got {row.conventions!r}"
    yield from _claim_problems(row.capabilities)


def _not_words(field: str, value: object, is_known: Callable[[str], bool], what: str) -> Iterator[str]:
    """A complaint unless ``value`` is a tuple of one or more different known words: a bare string would be read letter by letter."""
    words = value if isinstance(value, tuple) else ()
    if not words or not all(isinstance(word, str) and is_known(word) for word in words) or len(set(words)) < len(words):
        yield f"{field} is a tuple of {what}, got {value!r}"


def _claim_problems(claims: object) -> Iterator[str]:
    if not isinstance(claims, Capabilities):
        yield f"capabilities is a Capabilities(...), got {claims!r}"
        return
    if not isinstance(claims.modes, Mapping):
        yield f"capabilities.modes is a mapping of runner modes, got {claims.modes!r}"
        return
    for mode, claim in claims.modes.items():
        if not isinstance(mode, RunnerMode):
            yield f"capabilities.modes has keys of RunnerMode ({', '.join(mode.value for mode in RunnerMode)}), got {mode!r}"
        if not isinstance(claim, get_args(Claim)):
            yield f"capabilities.modes has values of {_CLAIMS}, got {claim!r}"
    for name in ("why_not", "interpreter_limits", "compiler_limits"):
        if not callable(getattr(claims, name)):
            yield f"capabilities.{name} is called with a case, got {getattr(claims, name)!r}"
    if not isinstance(claims.known_faults, tuple) or not all(isinstance(fault, KnownFault) for fault in claims.known_faults):
        yield f"capabilities.known_faults is a tuple of KnownFault(...), got {claims.known_faults!r}"
    for promise in ("deterministic", "batch_invariant"):
        if not isinstance(getattr(claims, promise), bool):
            yield f"capabilities.{promise} is True or False, got {getattr(claims, promise)!r}"
