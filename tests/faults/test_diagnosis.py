"""A failing row is explained by the fault that it has, by no other, and by none where it has none of them."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import distributions

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness import diagnose as module
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Capabilities, Conventions, KnownFault, RoundingStep
from attnmatrix.harness.cell import CellResult, run_cell
from attnmatrix.harness.diagnose import Diagnosis, candidates_for, diagnose
from attnmatrix.harness.faults.diagnosis_score import ALIKE, NAMED, diagnosis_score, score_diagnosis
from attnmatrix.harness.faults.fault import Fault, faults
from attnmatrix.harness.faults.lightning_subject import LightningSubject
from attnmatrix.harness.faults.softmax_subject import Partial, SoftmaxSubject
from attnmatrix.harness.forced import ForcedBackend
from attnmatrix.harness.matching import Search
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import Row, UsageError, find_row
from attnmatrix.harness.runners.eager import run_eager
from attnmatrix.harness.trial import run_trial

CPU = torch.device("cpu")
BY_ID = {fault.id: fault for fault in faults()}
EXTEND = parse_case("extend-p16-prefix0.20.33-new18.7.1-h4x2x128-bf16-shuffled")
RECURRENT = parse_case("lightning-extend-p16-prefix0.12.5-new5.4.2-h2x2x128-bf16-shuffled")


def found(fault: Fault, case: Case, mode: RunnerMode = RunnerMode.EAGER) -> Diagnosis:
    row = fault.row()
    return diagnose(row, mode, case, CPU, run_trial(row, mode, case, CPU, PEAKED))


@pytest.mark.parametrize(
    "fault_id",
    [
        "B04",
        "B12",
        "B35",
        "B58",
        "B68",
        "B76",
        "X26",
        "X90",
        "X95",
        "B41",
        "B117",
        "B121",
        "B128",
        "B139",
        "B141",
        "Y01",
        "Y04",
        "Y43",
        "Y45",
        "Y58",
        "Y60",
    ],
)
def test_a_fault_is_named_on_a_case_that_it_fails(fault_id: str) -> None:
    score = score_diagnosis(BY_ID[fault_id])
    assert score.outcome in (NAMED, ALIKE), score.text


@pytest.mark.parametrize("fault_id", ["B04", "X01", "X02", "X26", "B12"])
def test_softmax_faults_are_told_apart(fault_id: str) -> None:
    assert found(BY_ID[fault_id], EXTEND).ids == (fault_id,)


@pytest.mark.parametrize("fault_id", ["Y09", "Y05", "B115", "B123", "Y17", "Y22", "Y43", "Y44", "Y49", "Y51", "Y72"])
def test_recurrent_faults_are_told_apart(fault_id: str) -> None:
    assert found(BY_ID[fault_id], RECURRENT).ids == (fault_id,)


@pytest.mark.parametrize("fault_id", ["B117", "B121", "Y13"])
def test_faults_that_only_pools_show_are_told_apart(fault_id: str) -> None:
    decode = parse_case("lightning-decode-p16-prefix5.9-new1.1-h2x2x128-bf16-shuffled")
    assert found(BY_ID[fault_id], decode, RunnerMode.CG_DECODE).ids == (fault_id,)


def test_faults_that_a_case_cannot_tell_apart_are_named_together() -> None:
    alone = parse_case("lightning-extend-p16-prefix16-new2-h2x2x128-bf16-shuffled")
    assert found(BY_ID["B113"], alone).ids == ("B113", "Y05")


def test_the_sentence_says_fault_error_and_the_nearest_other() -> None:
    text = str(found(BY_ID["B04"], EXTEND))
    assert text.startswith("output equals the reference with the causal mask aligned top-left (B04), error 0; nearest other: ")
    assert str(found(BY_ID["Y45"], RECURRENT)).startswith("state equals the reference with no state written (Y45)")


class HalvedSoftmax(SoftmaxSubject):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q, k, v, layer_id, batch) * 0.5


class Noisy(LightningSubject):
    """A fault of nobody's list."""

    def step(self, before: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return super().step(before, k, v.flip(-1), layer)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q, k, v.flip(-1), layer_id, batch)


def cell(subject: type, case: Case, declared: str | None) -> CellResult:
    known = () if declared is None else (KnownFault(lambda case, mode: True, "finding", declared, "broken"),)
    row = Row("broken", case.kind, subject, Capabilities(known_faults=known), source=__file__)
    return run_cell(row, RunnerMode.EAGER, case, CPU, controls=())


@pytest.mark.parametrize(("subject", "case"), [(HalvedSoftmax, EXTEND), (Noisy, RECURRENT)], ids=["softmax", "lightning"])
def test_what_no_fault_produces_is_unexplained(subject: type, case: Case) -> None:
    result = cell(subject, case, None)
    assert result.status == "fail"
    assert result.diagnosis.startswith("unexplained: none of ")


def test_a_fault_within_the_limits_of_the_reference_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = replace(BY_ID["B04"], id="harmless", subject=SoftmaxSubject)
    monkeypatch.setattr(module, "faults", lambda: (harmless,))
    assert found(BY_ID["B04"], EXTEND).ids == ()
    assert found(replace(BY_ID["B04"], subject=SoftmaxSubject), EXTEND).ids == ()


class Grown(SoftmaxSubject):
    """Every output a little too large."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return (super().forward(q, k, v, layer_id, batch).float() * 1.007).to(q.dtype)


class Skewed(SoftmaxSubject):
    """Every other element a little too large, the rest too small."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        out = super().forward(q, k, v, layer_id, batch).float().unflatten(-1, (-1, 2))
        return (out * torch.tensor([1.007, 0.993])).flatten(-2).to(q.dtype)


def test_a_result_barely_over_its_limit_is_explained_by_no_other_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both lie within twice the limit of each other, as they do of the right result."""
    skewed = replace(BY_ID["B04"], id="skewed", subject=Skewed)
    monkeypatch.setattr(module, "faults", lambda: (skewed,))
    grown = Row("grown", EXTEND.kind, Grown, source=__file__)
    trial = run_trial(grown, RunnerMode.EAGER, EXTEND, CPU, PEAKED)
    assert 1 < max(float(m.ratio.max()) for verdict in trial.verdicts for m in verdict.measurements) < 2
    diagnosis = diagnose(grown, RunnerMode.EAGER, EXTEND, CPU, trial)
    assert (diagnosis.ids, diagnosis.nearest) == ((), skewed)
    assert diagnosis.distance < 2
    assert found(skewed, EXTEND).ids == ("skewed",)


def test_a_known_fault_must_fail_as_declared() -> None:
    subject = BY_ID["B04"].subject
    assert isinstance(subject, type)
    assert cell(subject, EXTEND, "B04").status == "known"
    assert cell(subject, EXTEND, "the causal mask aligned top-left").status == "known"
    other = cell(subject, EXTEND, "X26")
    assert other.status == "fail"
    assert other.reason.startswith("fails otherwise than its known fault says (X26): output equals the reference with the causal mask")
    assert cell(HalvedSoftmax, EXTEND, "unexplained").status == "known"
    assert cell(HalvedSoftmax, EXTEND, "B04").status == "fail"


def test_a_case_too_large_is_not_diagnosed_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST", 0.0)
    result = found(BY_ID["B04"], EXTEND)
    assert result.skipped
    assert "too large" in str(result)


def test_where_the_worst_row_lies() -> None:
    subject = BY_ID["B04"].subject
    assert isinstance(subject, type)
    where = cell(subject, EXTEND, None).where
    assert where.startswith(("out of step 0, layer ", "out of step 1, layer "))
    assert "bad rows by request" in where and "slot " in where and "head " in where


def test_the_score_knows_its_kinds() -> None:
    with pytest.raises(UsageError, match="unknown kind of fault 'none'"):
        diagnosis_score(["none"])


class TopLeftInTf32(BY_ID["Y80"].subject):  # type: ignore[misc]
    """Products as tensor cores form them from float32 factors: cut to 10 mantissa bits."""

    def scores(self, queries: Tensor, keys: Tensor, *where: object) -> Tensor:
        return super().scores(tf32(queries), tf32(keys), *where)

    def partial(self, scores: Tensor, visible: Tensor, values: Tensor) -> Partial:
        return super().partial(scores, visible, tf32(values))


def tf32(tensor: Tensor) -> Tensor:
    return (tensor.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


@pytest.mark.parametrize("seed", [3, 5])
def test_a_fault_in_tf32_is_measured_by_what_tf32_does_to_it(seed: int) -> None:
    """The limits know what the cut does to the right result; the fault's keys, fewer here, may feel it more."""
    case = parse_case(f"extend-p16-prefix0.8.16-new15.8.1-h4x2x128-fp32-shuffled-gain4-s{seed}")
    named = RoundingStep("products of factors cut to TF32", "TopLeftInTf32")
    row = Row("tf32", case.kind, TopLeftInTf32, conventions=Conventions(rounding=(named,)), source=__file__)
    trial = run_trial(row, RunnerMode.EAGER, case, CPU, PEAKED)
    assert diagnose(row, RunnerMode.EAGER, case, CPU, trial).ids == ("Y80",)


@pytest.mark.skipif(not any(distributions(name="conch-triton-kernels")), reason="needs conch-triton-kernels")
def test_a_real_kernel_is_diagnosed() -> None:
    case = parse_case("extend-p1-prefix2.4-new3.1-h4x2x128-fp32-shuffled")
    result = run_cell(find_row("conch", AttentionKind.SOFTMAX), RunnerMode.EAGER, case, CPU, controls=())
    assert result.status == "known"
    assert result.diagnosis.startswith(
        "output equals the reference with the causal mask of requests with several new tokens aligned top-left (Y80)"
    )


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
def test_no_fault_that_is_tried_leaves_the_pool(layout: str) -> None:
    """What raises on a CPU, an index out of bounds, ends the process on a GPU: there is nothing to catch."""
    case, mode = parse_case("extend-p16-prefix0.20.33-new18.7.1-h4x2x64-bf16-shuffled-alibi"), RunnerMode.EAGER
    row = replace(find_row("torch", AttentionKind.SOFTMAX), conventions=Conventions(kv_layout=layout))  # type: ignore[arg-type]
    trial = run_trial(row, mode, case, torch.device("cpu"), PEAKED)
    search = Search(row, mode, case, torch.device("cpu"), trial)
    tried = candidates_for(row, mode, case)
    assert ("B34" in [fault.id for fault in tried]) is (layout == "interleaved")
    for fault in tried:
        world = search.world(fault)
        backend = ForcedBackend(world, fault.subject(world.context), trial.outputs, lambda step, layer, out: None)
        for _ in run_eager(world, backend):
            backend.collect()
