"""Each case's share of its cell's probes, negative controls and properties.

Sampled cells (see ``row_suite``) try one probe a case, in turn, and fewer controls and properties. Graph modes, where a case is six or more
replays, try two probes a case, the second in turn, and long batches and stories of kinds with a state one, unless everything was asked
for; so do eager modes on a CPU outside the seed layouts and window edges. On a CPU requests take over places of others in a few cases of each cell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.pairwise import work
from attnmatrix.harness.controls import CONTROLS, Control
from attnmatrix.harness.probes import PROBES, Probe
from attnmatrix.harness.properties import examines
from attnmatrix.harness.registry import Row
from attnmatrix.harness.row_suite import is_sampled, row_suite, should_pass

LONG_WORK = 4_000_000  # see ``row_suite.work``
TRIES = {False: 2, True: 1}  # cases of a cell that try each control: eager modes, graph modes (which cost more)
TAKEN_OVER = 2  # cases of each kind in which requests take over places


@dataclass(frozen=True)
class Share:
    """What one case of a cell tries."""

    probes: tuple[Probe, ...]
    controls: tuple[Control, ...]
    properties: bool


def share_of(row: Row, mode: RunnerMode, case: Case, device: str, full: bool) -> Share:
    """The share of a case: each control is tried on the cheapest cases that the row claims to support; a case outside the cell's own tries all."""
    sampled = is_sampled(row, device, full)
    turn = int(case.content_hash, 16)
    probes: tuple[Probe, ...] = (PROBES[turn % len(PROBES)],) if sampled else PROBES
    if case.kind is not AttentionKind.SOFTMAX and work(case) > LONG_WORK and not full:
        probes = (PROBES[turn % len(PROBES)],)
    elif not sampled and not full and (mode.uses_graph or (device == "cpu" and not examines(mode, case))):
        probes = (PROBES[0], PROBES[1 + turn % (len(PROBES) - 1)])
    shares = _control_shares(row, mode, device, full)
    own = case.id in {member.id for member in row_suite(row, mode, device, full)}
    if own and case.id not in _taken_over(row, mode, device, full):
        probes = tuple(replace(probe, recycled="") for probe in probes)
    controls = tuple(control for control in CONTROLS if (case.id in shares[control.id] if own else control.applies(case)))
    return Share(probes, controls, examines(mode, case, few=sampled))


def _cheapest(row: Row, mode: RunnerMode, device: str, full: bool) -> list[Case]:
    """The cases of a cell that the row claims to support and that should pass, the cheapest first."""
    return sorted((case for case in row_suite(row, mode, device, full) if should_pass(row, mode, case, device)), key=work)


@cache
def _taken_over(row: Row, mode: RunnerMode, device: str, full: bool) -> frozenset[str]:
    """The cases in which requests take over places of others: all of them, but for a CPU's default run, in which what a backend keeps shows
    on the cheapest cases of each kind of batch; in sampled cells, with one probe a case, on those of either kind of taking over."""
    if full or device != "cpu":
        return frozenset(case.id for case in row_suite(row, mode, device, full))
    sampled = is_sampled(row, device, full)
    found: dict[object, list[str]] = {}
    for case in _cheapest(row, mode, device, full):
        if case.num_tokens and not case.story:
            kind = PROBES[int(case.content_hash, 16) % len(PROBES)].recycled if sampled else ""
            found.setdefault((case.forward, kind), []).append(case.id)
    return frozenset(name for names in found.values() for name in names[:TAKEN_OVER])


@cache
def _control_shares(row: Row, mode: RunnerMode, device: str, full: bool) -> dict[str, frozenset[str]]:
    """For each control the cases that try it; in sampled cells one case for each kind of control."""
    cheapest = _cheapest(row, mode, device, full)
    sampled = is_sampled(row, device, full)
    shares: dict[str, frozenset[str]] = {}
    kinds: set[str] = set()
    for control in CONTROLS:
        fitting = [case.id for case in cheapest if control.applies(case)]
        wanted = (0 if control.kind in kinds else 1) if sampled else TRIES[mode.uses_graph]
        kinds |= {control.kind} if fitting and wanted else set()
        shares[control.id] = frozenset(fitting[:wanted])
    return shares
