"""Whatever is typed wrong is one line on stderr and exit code 2, and nothing is written: no traceback, no huge allocation, no run first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_records import record

from attnmatrix.matrix.cli import main
from attnmatrix.matrix.evidence_file import write

WRONG: dict[str, str] = {
    # unknown words, missing and extra ones
    "nosuch": "No such command 'nosuch'; known: run, render, ",
    "list nosuch": "No such command 'nosuch'; known: backends, modes, cases, faults",
    "run extra": "unexpected extra argument",
    "run --nosuch": "--nosuch; see attnmatrix run --help",
    "explain": "argument 'case'; see attnmatrix explain --help",
    "compare one": "argument 'new'",
    "repro page_size_1 --out r.py": "'--backend'",
    "repro page_size_1 --backend torch": "'--out'",
    # numbers
    "run -n abc": "'-n'",
    "run -n -1": "'-n'",
    "run -n 1000000": "'-n'",
    "run --time-limit 0": "'--time-limit'",
    "run --time-limit 99999999999": "'--time-limit'",
    "faults -n 0": "'-n'",
    "faults -n x": "'-n'",
    "healthy -n 0": "'-n'",
    "healthy --cases 0": "'--cases'",
    "healthy --cases 1000000000000000000000000000000": "'--cases'",
    "healthy --seed -1": "'--seed'",
    # names
    "run --backend nosuch": "unknown backend 'nosuch'; known: ",
    "run --backend ,": "pair 'prefill,decode'",
    "run --backend torch,nosuch": "unknown backend 'nosuch'",
    "run --backend torch,torch,torch": "pair 'prefill,decode'",
    "run --case extend-p16-nonsense": "unknown case id 'extend-p16-nonsense': part 'nonsense'",
    "run --case decode-p16-prefix4-new2-h4x2x128-bf16-shuffled": "exactly one new token",
    "explain nosuch": "unknown case id 'nosuch'",
    "compare absent absent": "cannot read evidence 'absent'",
    "run --mode nosuch": "unknown mode 'nosuch'; known: eager",
    "run --device tpu": "unknown device 'tpu'; known: cpu, cuda",
    "faults --rule nosuch": "unknown rule 'nosuch'; known: ours, fixed",
    "faults --kind nosuch": "nosuch",
    "repro nosuch --backend torch --out r.py": "unknown case id 'nosuch'",
    "repro page_size_1 --backend nosuch --out r.py": "unknown backend 'nosuch'",
    "repro page_size_1 --backend auto --out r.py": "'auto' stands for",
    "explain page_size_1 --mode nosuch": "unknown mode 'nosuch'",
    "explain page_size_1 --probe nosuch": "unknown probe 'nosuch'; known: peaked, poison, needle",
    "list cases --mode nosuch": "unknown mode 'nosuch'",
    "new-backend torch": "backend 'torch' exists already",
    "new-backend a,b": "backend name 'a,b'",
    # modes without an adapter, cases that the mode or the rows do not take
    **{f"run --mode {mode}": f"mode '{mode}' has no adapter yet" for mode in ("de", "de_cg", "de_v2_cg", "eagle_draft", "eagle_de", "fkvmtp")},
    "list cases --mode de": "mode 'de' has no adapter yet",
    "run --mode eager --mode de --backend torch": "mode 'de' has no adapter yet; modes that have one: eager, ",
    "run --mode cg_decode --case page_size_1": "case 'page_size_1' is driven by eager, ",
    "run --case draft_extend-p16-prefix3-new2-h4x2x64-bf16-shuffled": "driven by no mode that has an adapter yet",
    "run --case draft_extend-p16-prefix3-new2-h4x2x64-bf16-shuffled --backend torch": "driven by no mode that has an adapter yet",
    "explain page_size_1 --mode verify": "not driven by mode verify; modes that drive it: eager, ",
    "explain draft_extend_v2-p16-prefix-new-h4x2x64-bf16-shuffled": "modes that drive it: none",
    "run --mode eager --case page_size_1 --case decode-p16-prefix9-new1-h4x2x128-bf16-shuffled --backend fla": "softmax attention",
    "run --case page_size": "names like it: page_size_1",
    "run --case common_prefix": "names like it: common_prefix.",
    "run --case deocde_page_boundary": "names like it: decode_page_boundary",
    "run --case zzzzzzzzzzz": "attnmatrix list cases",
    # ids of cases that are none, or that no machine should try
    "run --case decode-p16-prefix99999999999-new1-h4x2x128-bf16-shuffled": "elements of keys, at most",
    "run --case decode-p16-prefix9999999-new1-h4x2x128-bf16-shuffled": "elements of keys, at most",
    "run --case decode-p16-prefix1x99999999999-new1-h4x2x128-bf16-shuffled": "part 'prefix1x99999999999': more than 4096 requests",
    "run --case decode-p1000000000000000000000000000000-prefix9-new1-h4x2x128-bf16-shuffled": "elements of keys, at most",
    "run --case extend-p1-prefix0-new100000-h4x2x1-bf16-shuffled": "elements of scores",
    "run --case decode-p0-prefix9-new1-h4x2x128-bf16-shuffled": "page size must be >= 1",
    "run --case decode-p16-prefix9-new1-h4x2x0-bf16-shuffled": "positive multiple",
    "run --case decode-p16-prefix9-new1-h4x2x128-bf16-shuffled-cap1e999": "soft cap must be positive and finite",
    "explain lightning-extend-p16-prefix9-new1-h4x4x128-bf16-shuffled-thend99999999": "a number of the story is larger than 100000",
    "explain lightning-extend-p16-prefix9-new1-h4x4x64-bf16-shuffled-shard1of99999999999": "elements of slopes",
    "explain decode-p16-prefix9-new1-h4x2x64-bf16-shuffled-w99999999999": "a window is at most",
    "explain lightning-decode-p16-prefix9-new1-h4x4x99999-bf16-shuffled": "elements of states",
    # files to read
    **{f"{command} {file}": said for command in ("render --out x.md --evidence", "calibrate --out x.md --evidence") for file, said in {
        "absent": "cannot read evidence 'absent'", "folder": "no evidence (*.jsonl) in 'folder'", "empty.jsonl": "holds no record",
        "garbage.jsonl": "is no text: expected JSON lines", "cut.jsonl": "truncated: line 2", "other.jsonl": "unknown field `extra`", "kind.jsonl": "unknown kind 'mla9'",
    }.items()},
    "run --backend torch --mode eager --case page_size_1 --device cpu --missing-from absent.jsonl": "cannot read evidence 'absent.jsonl'",
    "compare good.jsonl kind.jsonl": "unknown kind 'mla9'",
    "compare folder good.jsonl": "no evidence",
    "render --evidence scored --out x.md": "kill_score.json",
    "render --evidence alarmed --out x.md": "healthy.json",
    "run --plugin absent.py": "cannot read plugin 'absent.py'",
    "run --plugin folder": "cannot read plugin 'folder'",
    "run --plugin syntax.py": "SyntaxError",
    "run --plugin nothing.py": "'nothing.py': registers no backend; it printed 'a word'",
    "run --plugin lines.py": "ValueError: one two",
    "repro page_size_1 --backend torch --out r.py --plugin nothing.py": "registers no backend",
    "list backends --plugin nothing.py": "registers no backend",
    # files to write, which are refused before anything long runs
    **{f"{command} {file}": "cannot write" for file in (".", "folder", "good.jsonl/x", "/proc/nowhere/x") for command in (
        "run --backend torch --mode eager --case page_size_1 --device cpu --evidence", "render --evidence good.jsonl --out",
        "calibrate --evidence good.jsonl --out", "faults --save", "healthy --save", "repro prefix_exact_page --backend conch --out",
    )},
    "new-backend my-kernel --out /proc/nowhere/x.py": "cannot write",
    "new-backend my-kernel --out good.jsonl": "exists already",
    "faults --save garbage.jsonl": "cannot read 'garbage.jsonl'",
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, file in (("scored", "kill_score.json"), ("alarmed", "healthy.json")):
        write(tmp_path / name / "e.jsonl", [record()])
        (tmp_path / name / file).write_text('{"ours": 3}')
    write(tmp_path / "good.jsonl", [record()])
    good = (tmp_path / "good.jsonl").read_text()
    fields = json.loads(good)
    texts = {
        "empty.jsonl": "",
        "garbage.jsonl": "\x00\xff{[garbage\n",
        "cut.jsonl": good + good[:50],
        "other.jsonl": json.dumps({**fields, "extra": 1}) + "\n",
        "kind.jsonl": json.dumps({**fields, "kind": "mla9"}) + "\n",
        "syntax.py": "this is (not Python",
        "nothing.py": "print('a word')",
        "lines.py": "raise ValueError('one\\ntwo')",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("line", WRONG)
def test_it_is_one_line_exit_code_2_and_nothing_written(here: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted((str(path), path.is_file() and path.read_bytes()) for path in here.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    told = capsys.readouterr()
    assert ended.value.code == 2, told.err
    assert WRONG[line] in told.err
    assert told.err.startswith("attnmatrix") and told.err.count("\n") == 1
    assert not told.out
    assert before == sorted((str(path), path.is_file() and path.read_bytes()) for path in here.rglob("*"))


@pytest.mark.parametrize("words", [[], ["list"], ["--help"], ["run", "--help"]], ids=" ".join)
def test_help_is_shown_on_demand_and_without_arguments(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr()
    assert not ended.value.code and not told.err
    assert told.out.startswith("Usage: attnmatrix ")
