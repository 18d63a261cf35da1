"""Names that stand for a row which the machine decides: ``fa``, and ``auto``.

``fa`` is the first of fa3, fa4 and fa2 that can run: its package is installed, it takes the device, and claims at least one case (a build
that refuses every paged case is none). ``auto`` is torch on a CPU, for float32, which the CUDA packages do not take, and for linear kinds; else
``fa,fi`` on Hopper (compute capability 9), ``trtllm`` on data-center Blackwell (10), ``fi`` on other GPUs. Evidence names the row that ran,
never the alias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnmatrix.cases.case import AttentionKind
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.options import DTYPES
from attnmatrix.cases.suites import suite
from attnmatrix.harness.capabilities import Supported
from attnmatrix.harness.hybrid import shares_a_pool
from attnmatrix.harness.lazy import torch
from attnmatrix.harness.registry import ALIASES, AUTO, Row, UsageError, find_row, find_rows, rows

if TYPE_CHECKING:
    from attnmatrix.harness.backend import AttentionBackend
    from attnmatrix.harness.context import Context

ANY = "*"
HOPPER, BLACKWELL = 9, 10  # major compute capabilities


@dataclass(frozen=True)
class Place:
    """Where something is to run: ``device`` type and, on a GPU, the major compute ``capability``."""

    device: str
    capability: Callable[[], int] = lambda: torch.cuda.get_device_capability()[0]


def create_attention_backend(name: str, context: Context) -> AttentionBackend:
    """The backend called ``name`` (a row, an alias, or a pair ``prefill,decode`` of them) over the pools of ``context``.

    ``context`` must follow the conventions of the row it resolves to. Raises UsageError naming the known rows for an unknown name, and
    the reasons when no row behind an alias can run.
    """
    place = Place(context.device.type, lambda: torch.cuda.get_device_capability(context.device)[0])
    dtype = "fp32" if context.dtype == torch.float32 else "bf16"
    return find_row(resolve(name, place, dtype, context.kind), context.kind).create(context)


def resolve(name: str, place: Place, dtype: str, kind: AttentionKind = AttentionKind.SOFTMAX) -> str:
    """The name of the row or pair that ``name`` stands for in ``place``, with inputs of ``dtype`` for attention of ``kind``."""
    if name == AUTO:
        name = _automatic(place, dtype, kind)
    return ",".join(_first_runnable(part, place) if part in ALIASES else part for part in name.split(","))


def chosen_rows(name: str, place: Place) -> tuple[Row, ...]:
    """The rows that ``name`` stands for; where that depends on the dtype, each is restricted to its own.

    ``*`` in a pair stands for every row that can run in ``place`` and shares a kind and a pool layout with the other side.
    """
    if ANY in name.split(","):
        return _all_pairs(name, place)
    if name != AUTO:
        return find_rows(resolve(name, place, DTYPES[0]))
    found: list[Row] = []
    for kind in AttentionKind:
        names = {dtype: resolve(name, place, dtype, kind) for dtype in DTYPES}
        for chosen in dict.fromkeys(names.values()):
            own = tuple(dtype for dtype in DTYPES if names[dtype] == chosen)
            found.append(replace(find_row(chosen, kind), dtypes=own if len(own) < len(DTYPES) else None))
    return tuple(found)


def _all_pairs(name: str, place: Place) -> tuple[Row, ...]:
    runnable = tuple(dict.fromkeys(row.name for row in rows() if why_not_runnable(row, place) is None))
    sides = [runnable if part == ANY else (resolve(part, place, DTYPES[0]),) for part in name.split(",")]
    if len(sides) != 2:
        raise UsageError(f"{ANY!r} stands for one side of a pair '{ANY},decode', 'prefill,{ANY}' or '{ANY},{ANY}', got {name!r}")
    pairs = [f"{first},{second}" for first in sides[0] for second in sides[1] if first != second]
    return tuple(row for pair in pairs if shares_a_pool(*pair.split(",")) for row in find_rows(pair))


def why_not_runnable(row: Row, place: Place) -> str | None:
    """None when a row can run in a place, else why not."""
    if row.missing:
        return f"{', '.join(row.missing)} not installed"
    if place.device not in row.devices:
        return f"needs {' or '.join(row.devices)}"
    mode = RunnerMode.EAGER
    if not any(
        isinstance(row.capabilities.claim(mode, case, place.device), Supported) for case in suite(row.kind, mode) if case.num_tokens
    ):
        return "claims no case"
    return None


def _automatic(place: Place, dtype: str, kind: AttentionKind) -> str:
    if place.device == "cpu" or dtype == "fp32" or kind is not AttentionKind.SOFTMAX:
        return "torch"
    return {HOPPER: "fa,fi", BLACKWELL: "trtllm"}.get(place.capability(), "fi")


def _first_runnable(alias: str, place: Place) -> str:
    reasons: list[str] = []
    for name in ALIASES[alias]:
        found = [why_not_runnable(row, place) for row in find_rows(name)]
        if None in found:
            return name
        reasons.append(f"{name}: {'; '.join(reason for reason in found if reason)}")
    raise UsageError(f"backend {alias!r}: none of {', '.join(ALIASES[alias])} can run on {place.device} ({'; '.join(reasons)})")
