"""The command line: ``attnmatrix list | run | render | faults | healthy | calibrate | explain | repro | compare | new-backend``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from attnmatrix.harness.registry import UsageError
from attnmatrix.matrix.containment import DEFAULT_LIMIT

MOST_CRASHES = 1000  # processes that a run replaces; pytest-xdist gives up after 4 a worker

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
listing = typer.Typer(no_args_is_help=True, help="List what is known: backends, modes, cases.")
app.add_typer(listing, name="list")

Names = Annotated[list[str] | None, typer.Option()]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
EvidenceDir = Annotated[Path | None, typer.Option(help="evidence file or folder; default: the committed one")]


def _print(rows: list[dict[str, object]], as_json: bool, key: str) -> None:
    from tabulate import tabulate

    typer.echo(json.dumps({key: rows}) if as_json else tabulate(rows, headers="keys"))


@listing.command("backends")
def list_backends(as_json: Json = False, plugin: Names = None) -> None:
    """The rows: kind, packages with their installed versions, devices."""
    from attnmatrix.matrix.selection import Selection

    found: list[dict[str, object]] = []
    for row in Selection(plugins=tuple(plugin or ())).rows():
        packages = ", ".join(f"{name} {row.version(name) or 'not installed'}" for name in row.distributions)
        where = "/".join(row.devices) + (" (interpreted on cpu)" if row.interpreted else "")
        found.append({"backend": row.name, "kind": row.kind.value, "packages": packages, "devices": where, "what": row.summary})
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
    from attnmatrix.matrix.selection import parse_modes

    found: dict[str, dict[str, object]] = {}
    for kind in AttentionKind:
        for runner in parse_modes(tuple(mode or ())):
            for case in gpu_suite(kind, runner):
                entry = found.setdefault(case.id, {"case": case.id, "name": case.name, "kind": kind.value, "modes": ""})
                entry["modes"] = f"{entry['modes']} {runner.value}".strip()
    _print(list(found.values()), as_json, "cases")


@app.command()
def run(
    backend: Annotated[list[str] | None, typer.Option(help="row, or pair 'prefill,decode'; repeatable")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="runner mode; repeatable")] = None,
    case: Annotated[list[str] | None, typer.Option(help="case id or name; repeatable")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
    workers: Annotated[int, typer.Option("-n", min=0, help="worker processes; 0 runs in this one")] = 0,
    limit: Annotated[
        int, typer.Option("--time-limit", min=1, help="seconds after which a cell in a worker (-n) ends as crash")
    ] = DEFAULT_LIMIT,
    full: Annotated[bool, typer.Option("--full", help="interpreted rows run every case")] = False,
    evidence: Annotated[Path | None, typer.Option(help="write the records to this file")] = None,
    plugin: Annotated[list[str] | None, typer.Option(help="Python file with more rows; repeatable")] = None,
) -> None:
    """Run cells and say whether each is as its row declares (exit 0) or not (exit 1)."""
    from attnmatrix.matrix.environment import resolve_device
    from attnmatrix.matrix.selection import Selection

    where = resolve_device(device)
    chosen = Selection(tuple(backend or ()), tuple(mode or ()), tuple(case or ()), where, full, tuple(plugin or ()))
    cells = chosen.cells()
    if not cells:
        raise UsageError("no cell to run: " + ("; ".join(chosen.not_run()) or "no case of this kind belongs to this mode"))
    if evidence is not None:
        _prepare(evidence)
    raise typer.Exit(_pytest(chosen, workers, limit, evidence))


def _prepare(evidence: Path) -> None:
    """Make the folder of a file that is written when all has run. Raises UsageError when it could not be written there."""
    if evidence.is_dir():
        raise UsageError(f"--evidence names a file, and {str(evidence)!r} is a folder")
    try:
        evidence.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write evidence {str(evidence)!r}: {error.strerror}") from error
    if not os.access(evidence.parent, os.W_OK):
        raise UsageError(f"cannot write evidence {str(evidence)!r}: its folder is read-only")


def _pytest(chosen: object, workers: int, limit: int, evidence: Path | None) -> int:
    import pytest

    from attnmatrix.matrix.selection import Selection

    assert isinstance(chosen, Selection)
    target = Path(__file__).with_name("test_cells.py")
    arguments = ["-q", "--import-mode=importlib", "-p", "attnmatrix.matrix.pytest_plugin", "--device", chosen.device]
    for option, values in (
        ("--backend", chosen.backends),
        ("--mode", chosen.modes),
        ("--case", chosen.cases),
        ("--plugin", chosen.plugins),
    ):
        arguments += [word for value in values for word in (option, value)]
    arguments += ["--full"] if chosen.full else []
    arguments += ["--evidence", str(evidence)] if evidence else []
    arguments += ["-n", str(workers), "--max-worker-restart", str(MOST_CRASHES)] if workers else []
    arguments += ["--time-limit", str(limit)]
    code = int(pytest.main([*arguments, str(target)]))
    return {0: 0, 1: 1, 2: 130}.get(code, 2)


@app.command()
def render(
    evidence: EvidenceDir = None,
    out: Annotated[Path | None, typer.Option(help="file to write; default: the committed MATRIX.md")] = None,
    check: Annotated[bool, typer.Option("--check", help="write nothing; exit 1 when the file differs")] = False,
) -> None:
    """Regenerate MATRIX.md from evidence."""
    from attnmatrix.matrix import healthy as false_alarms
    from attnmatrix.matrix.evidence_file import COMMITTED, read
    from attnmatrix.matrix.kill_score import load
    from attnmatrix.matrix.render import MATRIX_FILE, README_FILE, render_matrix, render_readme

    records = read(evidence or COMMITTED)
    score_file = (evidence or COMMITTED) / "kill_score.json"
    scores = load(score_file) if score_file.is_file() else {}
    alarms_file = (evidence or COMMITTED) / "healthy.json"
    alarms = false_alarms.load(alarms_file) if alarms_file.is_file() else None
    texts = {out or MATRIX_FILE: render_matrix(records, scores, alarms)}
    if out is None and README_FILE.is_file():
        texts[README_FILE] = render_readme(records, README_FILE.read_text(), scores)
    _write_or_check(texts, check, "attnmatrix render")


def _write_or_check(texts: dict[Path, str], check: bool, command: str) -> None:
    """Write generated files; with ``check`` only say which differ, exit 1 if any does."""
    differing = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
    if check:
        for path in differing:
            typer.echo(f"{path} differs from what the evidence gives; run '{command}'", err=True)
        raise typer.Exit(1 if differing else 0)
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        typer.echo(f"wrote {path}")


@app.command()
def explain(
    case: str, mode: Annotated[str | None, typer.Option(help="runner mode; default: the first that drives the case")] = None
) -> None:
    """Show a case's layout as text: tables, masks, which token sees what."""
    from attnmatrix.cases.suites import modes_of
    from attnmatrix.matrix.explain import explain_case
    from attnmatrix.matrix.selection import find_cases, parse_modes

    texts = [explain_case(found, parse_modes((mode,))[0] if mode else modes_of(found)[0]) for found in find_cases(case)]
    typer.echo("\n\n".join(texts))


@app.command("faults")
def planted_faults(
    rule: Annotated[str, typer.Option(help="ours, or fixed: a fixed-tolerance suite on the same faults")] = "ours",
    kind: Names = None,
    as_json: Json = False,
    workers: Annotated[int, typer.Option("-n", min=1, help="worker processes")] = 2,
    save_to: Annotated[Path | None, typer.Option("--save", help="keep the score in this file")] = None,
) -> None:
    """Kill score: which planted faults the judgement rejects, by kind. Exit 1 when one survives rule 'ours'."""
    from attnmatrix.matrix import kill_score

    found = kill_score.kill_score(rule, tuple(kind or ()), workers, lambda line: typer.echo(line, err=True))
    if save_to is not None:
        kill_score.save(found, save_to)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(found).decode())
    else:
        typer.echo(kill_score.report(found))
    raise typer.Exit(int(rule == "ours" and bool(found.survivors or found.crashed)))


@app.command()
def healthy(
    cases: Annotated[int, typer.Option(min=1, help="random cases")] = 3000,
    seed: Annotated[int, typer.Option(min=0, help="another seed, other cases")] = 0,
    as_json: Json = False,
    workers: Annotated[int, typer.Option("-n", min=1, help="worker processes")] = 2,
    save_to: Annotated[Path | None, typer.Option("--save", help="keep the outcome in this file")] = None,
) -> None:
    """False alarms: right rows on random cases. Exit 1 when one verdict fails."""
    import msgspec

    from attnmatrix.matrix import healthy as false_alarms

    found = false_alarms.run_healthy(cases, seed, workers, lambda line: typer.echo(line, err=True))
    if save_to is not None:
        false_alarms.save(found, save_to)
    typer.echo(msgspec.json.encode(found).decode() if as_json else false_alarms.report(found))
    raise typer.Exit(int(bool(found.alarms)))


@app.command()
def calibrate(
    evidence: EvidenceDir = None,
    out: Annotated[Path | None, typer.Option(help="file to write; default: the committed harness/calibration.md")] = None,
    check: Annotated[bool, typer.Option("--check", help="write nothing; exit 1 when the file differs")] = False,
) -> None:
    """How far right rows stay from their baselines: the table behind the limit's factor, from evidence."""
    from attnmatrix.matrix.calibration import CALIBRATION_FILE, calibration
    from attnmatrix.matrix.evidence_file import COMMITTED, read

    _write_or_check({out or CALIBRATION_FILE: calibration(read(evidence or COMMITTED))}, check, "attnmatrix calibrate")


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


@app.command()
def repro(
    case: str,
    backend: Annotated[str, typer.Option(help="row")],
    out: Annotated[Path, typer.Option(help="script to write")],
    plugin: Names = None,
) -> None:
    """Write a stand-alone script, with torch and the row's package only, that shows what the row does with a case."""
    from attnmatrix.harness.registry import find_row
    from attnmatrix.matrix.repro import repro_script
    from attnmatrix.matrix.selection import Selection, find_cases

    Selection(plugins=tuple(plugin or ())).rows()
    text = repro_script(find_row(backend, find_cases(case)[0].kind), find_cases(case)[0])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    typer.echo(f"wrote {out}: {len(text.splitlines())} lines; run it with the package installed")


@app.command()
def compare(old: Path, new: Path, as_json: Json = False) -> None:
    """What changed between two evidence sets; exit 1 on a regression."""
    from attnmatrix.matrix.compare import compare_evidence
    from attnmatrix.matrix.evidence_file import read

    changes = compare_evidence(read(old), read(new))
    if as_json:
        typer.echo(json.dumps({"changes": [change.as_dict() for change in changes]}))
    else:
        for change in changes:
            typer.echo(change.line())
        typer.echo(f"{len(changes)} cells changed, {sum(change.regression for change in changes)} regressions")
    raise typer.Exit(1 if any(change.regression for change in changes) else 0)


@app.command("new-backend")
def new_backend(name: str, out: Annotated[Path | None, typer.Option(help="file to write; default: NAME.py")] = None) -> None:
    """Write a row to fill in."""
    from attnmatrix.matrix.scaffold import write_row

    typer.echo(write_row(name, out))


def main() -> None:
    """Entry point: usage errors become one line and exit code 2."""
    try:
        app()
    except UsageError as error:
        typer.echo(f"attnmatrix: {error}", err=True)
        sys.exit(2)
