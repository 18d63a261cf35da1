"""The seed of a case comes from its content alone."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads, Placement, Scratch
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.cases.suites import suite

CASE = Case(ForwardMode.TARGET_VERIFY, 16, (0, 8), (3, 3), Heads(4, 2, 128))
STATES = Case(ForwardMode.EXTEND, 16, (0, 8), (3, 3), Heads(2, 2, 128), kind=AttentionKind.LIGHTNING)
STATE_CHANGES: tuple[dict[str, object], ...] = (
    {"state_dtype": "bf16"},
    {"track_lens": (0, 2)},
    {"story": "x2_d"},
    {"shard": (1, 2)},
)


@dataclass(frozen=True)
class CaseOfTomorrow(Case):
    """A case with one more optional field."""

    colour: str | None = None


def test_a_name_changes_nothing() -> None:
    named = CASE.but(name="renamed")
    assert named == CASE
    assert hash(named) == hash(CASE)
    assert named.data_seed == CASE.data_seed


def test_the_hash_never_drifts() -> None:
    assert CASE.content_hash == "9dfc397c24248651"
    assert CASE.but(gain=4.0, trees=((-1, 0, 0),), kv_dtype="fp8e4m3").content_hash == "d176cac97666197e"


def test_a_new_field_at_its_default_changes_nothing() -> None:
    old = {f.name: getattr(CASE, f.name) for f in fields(CASE)}
    assert CaseOfTomorrow(**old).content_hash == CASE.content_hash
    assert CaseOfTomorrow(**old, colour="red").content_hash != CASE.content_hash


@pytest.mark.parametrize(
    "change",
    [
        {"forward": ForwardMode.DRAFT_EXTEND_V2},
        {"page_size": 32},
        {"prefix_lens": (8, 0)},
        {"new_lens": (3, 4)},
        {"heads": Heads(4, 4, 128)},
        {"dtype": "fp16"},
        {"placement": Placement.CONTIGUOUS},
        {"kind": AttentionKind.LIGHTNING},
        {"scratch": Scratch.NONE},
        {"window": 4},
        {"window": 4, "window_layers": "first"},
        {"soft_cap": 30.0},
        {"sinks": True},
        {"alibi": True},
        {"trees": ((-1, 0, 1),)},
        {"draft_kind": "eagle"},
        {"kv_dtype": "fp8e4m3"},
        {"gain": 1.0000001},
        {"state_scale": 1.0},
        {"strided": True},
        {"spare_pages": 3},
        {"score_drop": 200.0},
        {"seed": 1},
    ],
    ids="+".join,
)
def test_every_field_changes_the_data(change: dict[str, object]) -> None:
    other = CASE.but(**change)
    assert other.data_seed != CASE.data_seed
    assert other.id != CASE.id


@pytest.mark.parametrize("change", STATE_CHANGES, ids="+".join)
def test_every_field_of_kinds_with_a_state_changes_the_data(change: dict[str, object]) -> None:
    other = STATES.but(**change)
    assert other.data_seed != STATES.data_seed
    assert other.id != STATES.id
    with pytest.raises(ValueError, match="softmax attention has no"):
        STATES.but(kind=AttentionKind.SOFTMAX, **change)


def test_the_lists_above_name_every_field() -> None:
    marks = test_every_field_changes_the_data.pytestmark  # type: ignore[attr-defined]
    changed = {name for change in (*marks[0].args[1], *STATE_CHANGES) for name in change}
    assert changed == {f.name for f in fields(Case)} - {"name"}


def test_equal_cases_have_equal_data() -> None:
    typed = CASE.but(soft_cap=30, gain=4, state_scale=1)
    written = CASE.but(soft_cap=30.0, gain=4.0, state_scale=1.0)
    assert typed == written
    assert typed.content_hash == written.content_hash


@pytest.mark.parametrize("kind", AttentionKind)
@pytest.mark.parametrize("mode", RunnerMode)
def test_no_two_batches_of_a_schedule_share_a_seed(mode: RunnerMode, kind: AttentionKind) -> None:
    for case in suite(kind, mode):
        batches = schedule(case, mode).batches
        assert len({batch.data_seed for batch in batches}) == len(batches), case.id


def test_but_drops_the_name() -> None:
    assert CASE.but(name="first").but(seed=2).name == ""
