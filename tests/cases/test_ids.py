"""A case id can be typed back, for every case that is tried and for any other valid one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads, Placement, Scratch
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.options import DRAFT_KINDS, DTYPES, KV_DTYPES, format_trees, parse_trees
from attnmatrix.cases.schedule import schedule
from attnmatrix.cases.suites import suite

NUMBERS = st.floats(min_value=1e-30, max_value=1e30, allow_nan=False)
PLAIN = Case(ForwardMode.EXTEND, 16, (0, 8, 16), (15, 8, 1), Heads(4, 2, 128))


@st.composite
def trees_for(draw: st.DrawFn, new: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    if not draw(st.booleans()):
        return ()
    trees = [tuple(draw(st.integers(-1, node - 1)) for node in range(length)) for length in new]
    one_for_all = len(set(new)) == 1 and draw(st.booleans())
    return tuple(trees[:1] if one_for_all else trees)


@st.composite
def valid_cases(draw: st.DrawFn) -> Case:
    forward, kind = draw(st.sampled_from(ForwardMode)), draw(st.sampled_from(AttentionKind))
    size = 0 if forward is ForwardMode.IDLE else draw(st.integers(0, 7))
    lengths = st.sampled_from([0, 1, 7, 16, 4000]) | st.integers(0, 300)
    prefix = tuple(draw(st.lists(lengths, min_size=size, max_size=size)))
    new = (1,) * size if forward is ForwardMode.DECODE else tuple(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)))
    group, kv = draw(st.integers(1, 8)), draw(st.integers(1, 9))
    softmax: dict[str, object] = {}
    if kind is AttentionKind.SOFTMAX:
        softmax = {
            "window": draw(st.none() | st.integers(1, 5000)),
            "soft_cap": draw(st.none() | NUMBERS),
            "sinks": draw(st.booleans()),
            "alibi": draw(st.booleans()),
            "kv_dtype": draw(st.none() | st.sampled_from(KV_DTYPES)),
        }
        if softmax["window"] is not None:
            softmax["window_layers"] = draw(st.sampled_from(["all", "first"]))
    return Case(
        forward,
        draw(st.sampled_from([1, 16, 32, 64, 128, 256]) | st.integers(1, 1000)),
        prefix,
        new,
        Heads(group * kv, kv, draw(st.sampled_from([64, 80, 96, 128, 256]))),
        dtype=draw(st.sampled_from(DTYPES)),
        kind=kind,
        placement=draw(st.sampled_from(Placement)),
        scratch=draw(st.sampled_from(Scratch)),
        trees=draw(trees_for(new)) if forward is ForwardMode.TARGET_VERIFY else (),
        draft_kind=draw(st.none() | st.sampled_from(DRAFT_KINDS)),
        gain=draw(st.just(1.0) | NUMBERS),
        state_scale=draw(st.just(0.05) | NUMBERS),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**40)),
        **softmax,  # type: ignore[arg-type]
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(valid_cases())
def test_any_valid_case_is_typed_back(case: Case) -> None:
    back = parse_case(case.id)
    assert back == case
    assert (back.id, back.content_hash) == (case.id, case.content_hash)


@pytest.mark.parametrize("kind", AttentionKind)
def test_every_suite_case_and_derived_batch_is_typed_back(kind: AttentionKind) -> None:
    tried = {(batch, mode) for mode in RunnerMode for case in suite(kind, mode) for batch in schedule(case, mode).batches}
    assert tried
    for case, mode in tried:
        assert parse_case(case.id) == case, f"{mode.value}: {case.id}"


@pytest.mark.parametrize("kind", AttentionKind)
def test_ids_and_hashes_are_unique_over_all_suites(kind: AttentionKind) -> None:
    cases = {case for mode in RunnerMode for case in suite(kind, mode)}
    assert len({case.id for case in cases}) == len(cases) == len({case.content_hash for case in cases})


def test_the_documented_id() -> None:
    assert PLAIN.id == "extend-p16-prefix0.8.16-new15.8.1-h4x2x128-bf16-shuffled"
    assert parse_case("extend-p16-prefix0.8.16-new15.8.1-h4x2x128-bf16-shuffled") == PLAIN


def test_every_option_has_its_word() -> None:
    case = Case(
        ForwardMode.TARGET_VERIFY,
        16,
        (14,) * 5,
        (3,) * 5,
        Heads(4, 2, 128),
        dtype="fp16",
        placement=Placement.SCATTERED,
        scratch=Scratch.FIRST,
        window=8,
        window_layers="first",
        soft_cap=30.0,
        sinks=True,
        alibi=True,
        trees=((-1, 0, 0),),
        draft_kind="eagle",
        kv_dtype="fp8e4m3",
        gain=1e-7,
        strided=True,
        seed=3,
        spare_pages=7,
        score_drop=200.0,
    )
    assert case.id == (
        "target_verify-p16-prefix14x5-new3x5-h4x2x128-fp16-scattered-scratchfirst-w8-wfirst-cap30-"
        "sinks-alibi-strided-treer.0.0-eagle-kvfp8e4m3-gain1e-07-spare7-drop200-s3"
    )
    assert parse_case(case.id) == case


@pytest.mark.parametrize(("lens", "text"), [((8,) * 3, "8.8.8"), ((8,) * 4, "8x4"), ((0, 8, 8, 8, 8, 8, 1), "0.8x5.1"), ((), "")])
def test_runs_of_four_and_more_are_counted(lens: tuple[int, ...], text: str) -> None:
    assert f"-prefix{text}-" in PLAIN.but(prefix_lens=lens, new_lens=lens).id


def test_the_name_is_no_part_of_the_id() -> None:
    assert PLAIN.but(name="anything").id == PLAIN.id


def test_words_may_come_in_any_order() -> None:
    assert parse_case("bf16-shuffled-new15.8.1-prefix0.8.16-h4x2x128-extend-p16") == PLAIN


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "part ''"),
        ("extend-p16", "prefix_lens, new_lens, heads, dtype, placement missing"),
        (PLAIN.id.replace("-bf16", ""), "dtype missing"),
        (PLAIN.id + "-p32", "page_size is given twice"),
        (PLAIN.id + "-blue", "'blue'"),
        (PLAIN.id.replace("h4x2x128", "h4x2"), "'h4x2'"),
        (PLAIN.id.replace("new15.8.1", "new15..1"), "'new15..1'"),
        (PLAIN.id + "-treer.0.q", "'treer.0.q'"),
        (PLAIN.id.replace("new15.8.1", "new15.8"), "3 prefix lengths but 2 new lengths"),
    ],
)
def test_a_bad_id_is_refused_by_the_part_that_is_wrong(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=r"^(unknown case id|case) ") as caught:
        parse_case(text)
    assert named in str(caught.value)


@given(st.lists(st.lists(st.integers(-1, 12)).map(tuple), min_size=1).map(tuple))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_trees_as_text(trees: tuple[tuple[int, ...], ...]) -> None:
    assert parse_trees(format_trees(trees)) == trees
