"""The command line: ``attnmatrix list | run | render | faults | healthy | calibrate | explain | repro | compare | new-backend``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from attnmatrix.harness.registry import UsageError
from attnmatrix.matrix.cli_list import Json, Names, listing
from attnmatrix.matrix.containment import DEFAULT_LIMIT
from attnmatrix.matrix.usage import run_app
from attnmatrix.matrix.whole_file import check_place, write_whole

MOST_CRASHES = 1000  # processes that a run replaces; pytest-xdist gives up after 4 a worker
MOST_WORKERS, MOST_CASES, MOST_SECONDS = 512, 1_000_000, 7 * 24 * 3600  # a typing error beyond these would exhaust the machine

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(listing, name="list")

EvidenceDir = Annotated[Path | None, typer.Option(help="evidence file or folder; default: the committed one")]


@app.command()
def run(
    backend: Annotated[list[str] | None, typer.Option(help="row, or pair 'prefill,decode'; repeatable")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="runner mode; repeatable")] = None,
    case: Annotated[list[str] | None, typer.Option(help="case id or name; repeatable")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
    workers: Annotated[int, typer.Option("-n", min=0, max=MOST_WORKERS, help="worker processes; 0 runs in this one")] = 0,
    limit: Annotated[
        int, typer.Option("--time-limit", min=1, max=MOST_SECONDS, help="seconds after which a cell in a worker (-n) ends as crash")
    ] = DEFAULT_LIMIT,
    full: Annotated[
        bool, typer.Option("--full", help="on a CPU too, graph modes and the rows that are sampled there run every case")
    ] = False,
    evidence: Annotated[Path | None, typer.Option(help="write the records to this file")] = None,
    missing_from: Annotated[
        Path | None, typer.Option("--missing-from", help="only cells of which this evidence has no record of this code and machine")
    ] = None,
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
        from attnmatrix.matrix.evidence_file import check_evidence_place

        check_evidence_place(evidence)
    if missing_from is not None:
        from attnmatrix.matrix.recorded import without_recorded

        if not without_recorded(cells, missing_from, where):
            typer.echo(f"nothing to run: {missing_from} has a record of each of the {len(cells)} cells")
            raise typer.Exit(0)
    raise typer.Exit(_pytest(chosen, workers, limit, evidence, missing_from))


def _pytest(chosen: object, workers: int, limit: int, evidence: Path | None, missing_from: Path | None) -> int:
    import pytest

    from attnmatrix.matrix.selection import Selection

    assert isinstance(chosen, Selection)
    target = Path(__file__).with_name("test_cells.py")
    arguments = ["-q", "--import-mode=importlib", "-p", "attnmatrix.matrix.pytest_plugin", "--device", chosen.device]
    arguments += ["-p", "no:hypothesispytest"]  # where installed, it is imported for its summary: seconds of every run
    for option, values in (
        ("--backend", chosen.backends),
        ("--mode", chosen.modes),
        ("--case", chosen.cases),
        ("--plugin", chosen.plugins),
    ):
        arguments += [word for value in values for word in (option, value)]
    arguments += ["--full"] if chosen.full else []
    arguments += ["--evidence", str(evidence)] if evidence else []
    arguments += ["--missing-from", str(missing_from)] if missing_from else []
    arguments += ["-n", str(workers), "--max-worker-restart", str(MOST_CRASHES)] if workers else []
    arguments += ["--time-limit", str(limit)]
    code = int(pytest.main([*arguments, str(target)]))
    return {0: 0, 1: 1, 2: 130}.get(code, 2)


@app.command()
def render(
    evidence: EvidenceDir = None,
    out: Annotated[Path | None, typer.Option(help="file to write; default: the committed MATRIX.md")] = None,
    check: Annotated[bool, typer.Option("--check", help="write nothing; exit 1 when the file differs")] = False,
    plugin: Annotated[
        list[str] | None, typer.Option(help="Python file with more rows, whose records can be stale then; repeatable; needs --out")
    ] = None,
) -> None:
    """Regenerate MATRIX.md from evidence."""
    from attnmatrix.harness.registry import load_plugin
    from attnmatrix.matrix.evidence_file import COMMITTED, read
    from attnmatrix.matrix.healthy import Healthy
    from attnmatrix.matrix.kept import read_kept
    from attnmatrix.matrix.kill_score import load
    from attnmatrix.matrix.render import MATRIX_FILE, render_matrix
    from attnmatrix.matrix.render_readme import README_FILE, render_readme

    if plugin and out is None:
        raise UsageError("--plugin needs --out: the committed pages hold the rows of this repository only")
    for path in plugin or ():
        load_plugin(path)
    records = read(evidence or COMMITTED)
    scores = load((evidence or COMMITTED) / "kill_score.json")
    alarms_file = (evidence or COMMITTED) / "healthy.json"
    alarms = read_kept(alarms_file, Healthy) if alarms_file.is_file() else None
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
        write_whole(path, text.encode())
        typer.echo(f"wrote {path}")


@app.command()
def explain(
    case: str,
    mode: Annotated[str | None, typer.Option(help="runner mode; default: the first that drives the case")] = None,
    probe: Annotated[str, typer.Option(help="peaked, poison or needle: the last batch, and so the pool, differs")] = "peaked",
) -> None:
    """Show a case's layout as text: tables, masks, which token sees what."""
    from attnmatrix.matrix.explain import explain_case
    from attnmatrix.matrix.selection import explained_mode, find_cases

    texts = [explain_case(found, explained_mode(found, mode), probe) for found in find_cases(case)]
    typer.echo("\n\n".join(texts))


@app.command("faults")
def planted_faults(
    rule: Annotated[str, typer.Option(help="ours, or fixed: a fixed-tolerance suite on the same faults")] = "ours",
    kind: Names = None,
    as_json: Json = False,
    workers: Annotated[int, typer.Option("-n", min=1, max=MOST_WORKERS, help="worker processes")] = 2,
    save_to: Annotated[Path | None, typer.Option("--save", help="keep the score in this file")] = None,
) -> None:
    """Kill score: which planted faults the judgement rejects, by kind. Exit 1 when one survives rule 'ours'."""
    from attnmatrix.harness.faults.score import check_rule
    from attnmatrix.matrix import kill_score

    check_rule(rule, tuple(kind or ()))
    if save_to is not None:
        check_place(save_to)
        kill_score.load(save_to)
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
    cases: Annotated[int, typer.Option(min=1, max=MOST_CASES, help="random cases")] = 3000,
    seed: Annotated[int, typer.Option(min=0, help="another seed, other cases")] = 0,
    as_json: Json = False,
    workers: Annotated[int, typer.Option("-n", min=1, max=MOST_WORKERS, help="worker processes")] = 2,
    save_to: Annotated[Path | None, typer.Option("--save", help="keep the outcome in this file")] = None,
) -> None:
    """False alarms: right rows on random cases. Exit 1 when one verdict fails."""
    import msgspec

    from attnmatrix.matrix import healthy as false_alarms
    from attnmatrix.matrix.kept import keep

    if save_to is not None:
        check_place(save_to)
    found = false_alarms.run_healthy(cases, seed, workers, lambda line: typer.echo(line, err=True))
    if save_to is not None:
        keep(save_to, found)
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


@app.command()
def repro(
    case: str,
    backend: Annotated[str, typer.Option(help="row")],
    out: Annotated[Path, typer.Option(help="script to write")],
    plugin: Names = None,
) -> None:
    """Write a stand-alone script, with torch and the row's package only, that shows what the row does with a case."""
    from attnmatrix.matrix.repro import repro_script
    from attnmatrix.matrix.selection import Selection, row_and_case

    Selection(plugins=tuple(plugin or ())).rows()
    text = repro_script(*row_and_case(backend, case))
    write_whole(out, text.encode())
    typer.echo(f"wrote {out}: {len(text.splitlines())} lines; run it with the package installed")


@app.command()
def compare(old: Path, new: Path, as_json: Json = False) -> None:
    """What changed between two evidence sets, on the devices of the new one; exit 1 on a regression."""
    from attnmatrix.matrix.compare import compare_evidence, devices_left_out
    from attnmatrix.matrix.evidence_file import read

    before, after = read(old), read(new)
    left_out = devices_left_out(before, after)
    changes = compare_evidence([record for record in before if record.device not in left_out], after)
    if as_json:
        typer.echo(json.dumps({"changes": [change.as_dict() for change in changes], "devices_left_out": left_out}))
    else:
        for change in changes:
            typer.echo(change.line())
        for device in left_out:
            typer.echo(f"not compared: {device}, of which the new evidence has no record")
        typer.echo(f"{len(changes)} cells changed, {sum(change.regression for change in changes)} regressions")
    raise typer.Exit(1 if any(change.regression for change in changes) else 0)


@app.command("new-backend")
def new_backend(name: str, out: Annotated[Path | None, typer.Option(help="file to write; default: NAME_row.py")] = None) -> None:
    """Write a row to fill in."""
    from attnmatrix.matrix.scaffold import write_row

    typer.echo(write_row(name, out))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: runs a command line, that of the process by default, and exits with its code."""
    sys.exit(run_app(app, sys.argv[1:] if arguments is None else arguments))
