"""``attnmatrix list backends | modes | cases | faults``: what is known."""

from __future__ import annotations

import json
from typing import Annotated

import typer

listing = typer.Typer(help="List what is known: backends, modes, cases, faults.", rich_markup_mode=None)

Names = Annotated[list[str] | None, typer.Option()]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]


def _print(rows: list[dict[str, object]], as_json: bool, key: str) -> None:
    from tabulate import tabulate

    text = json.dumps({key: rows}) if as_json else tabulate(rows, headers="keys")
    typer.echo("\n".join(line.rstrip() for line in text.splitlines()))  # the last column is the longest: nothing to pad it for


@listing.command("backends")
def list_backends(as_json: Json = False, plugin: Names = None) -> None:
    """The rows: kind, packages with their installed versions, devices."""
    from attnmatrix.matrix.selection import Selection

    found: list[dict[str, object]] = []
    for row in Selection(plugins=tuple(plugin or ())).rows():
        packages = ", ".join(f"{name} {row.version(name) or 'not installed'}" for name in row.distributions)
        where = "/".join(row.devices) + (" (interpreted on cpu)" if row.interpreted else "")
        found.append({"backend": row.name, "kind": row.kind.value, "devices": where, "what": row.summary, "packages": packages})
    _print(found, as_json, "backends")


@listing.command("modes")
def list_modes(as_json: Json = False) -> None:
    """The runner modes: the columns."""
    from attnmatrix.cases.modes import RunnerMode
    from attnmatrix.harness.adapted_modes import ADAPTED_MODES

    _print(
        [
            {"mode": m.value, "column": m.column, "drives": "/".join(f.value for f in m.forward_modes), "adapter": "yes" if m in ADAPTED_MODES else "not yet"}
            for m in RunnerMode
        ],
        as_json,
        "modes",
    )  # fmt: skip


@listing.command("cases")
def list_cases(as_json: Json = False, mode: Names = None) -> None:
    """The cases of each kind and mode."""
    from attnmatrix.cases.case import AttentionKind
    from attnmatrix.cases.suites import gpu_suite
    from attnmatrix.matrix.selection import parse_modes, require_adapters

    if mode:
        require_adapters(parse_modes(tuple(mode)))
    found: dict[str, dict[str, object]] = {}
    for kind in AttentionKind:
        for runner in parse_modes(tuple(mode or ())):
            for case in gpu_suite(kind, runner):
                entry = found.setdefault(case.id, {"name": case.name, "kind": kind.value, "modes": "", "case": case.id})
                entry["modes"] = f"{entry['modes']} {runner.value}".strip()
    _print(list(found.values()), as_json, "cases")


@listing.command("faults")
def list_faults(as_json: Json = False) -> None:
    """The planted faults, and the listed ones that are not run."""
    from attnmatrix.harness.faults.fault import faults, not_injected

    found: list[dict[str, object]] = [
        {"fault": f.id, "kind": f.kind, "status": "injected", "attention": f.attention.value, "title": f.title, "source": f.source}
        for f in faults()
    ]
    found += [
        {"fault": n.id, "kind": n.kind, "status": n.status, "attention": "", "title": n.title, "source": n.reason} for n in not_injected()
    ]
    _print(found, as_json, "faults")
