"""No claim is taken on trust: what a row declares is held against what the run shows, in both directions."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backends.torch_softmax import TorchSoftmax
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Blocked, Capabilities, Claim, Deferred, KnownFault, NotApplicable, Supported
from attnmatrix.harness.cell import CellResult, run_cell
from attnmatrix.harness.registry import Row

CPU = torch.device("cpu")
CASE = Case(ForwardMode.DECODE, 16, (14, 15, 16), (1, 1, 1), Heads(4, 2, 64))
REFUSAL = Blocked("page size", "ValueError", "page size must be a multiple of 256")
COMPILED = Blocked("head dim", "RuntimeError", "size of tensor|shape|inconsistent")


class WrongScale(TorchSoftmax):
    """Wrong everywhere, and quietly so."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q * 1.25, k, v, layer_id, batch)


class RaisesItself(TorchSoftmax):
    """The row poses as a package that refuses."""

    def prepare_metadata(self, batch: Batch) -> None:
        raise ValueError("page size must be a multiple of 256")


class RaisesInAHelper(TorchSoftmax):
    def prepare_metadata(self, batch: Batch) -> None:
        refuse()


class RaisesInExec(TorchSoftmax):
    def prepare_metadata(self, batch: Batch) -> None:
        exec("raise ValueError('page size must be a multiple of 256')")


class RaisesByThrow(TorchSoftmax):
    def prepare_metadata(self, batch: Batch) -> None:
        (_ for _ in ()).throw(ValueError("page size must be a multiple of 256"))


class CompiledCodeRefuses(TorchSoftmax):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return torch.matmul(q, torch.ones(q.shape[-1] + 1, 1))


class RefusesAfterWriting(CompiledCodeRefuses):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        assert self.context.kv is not None
        self.context.kv.k(0).zero_().sub_(1.0)
        return super().forward(q, k, v, layer_id, batch)


class Missing(TorchSoftmax):
    """A package that is there, but lacks a module."""

    def prepare_metadata(self, batch: Batch) -> None:
        importlib.import_module("torch.no_such_module")


class AssertsFalse(TorchSoftmax):
    def prepare_metadata(self, batch: Batch) -> None:
        raise AssertionError("page size must be a multiple of 256")


class OutOfMemory(TorchSoftmax):
    def prepare_metadata(self, batch: Batch) -> None:
        raise torch.OutOfMemoryError("page size must be a multiple of 256")


class FlatOutput(TorchSoftmax):
    """Returns another shape than it declares."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q, k, v, layer_id, batch).flatten(1)


class WideOutput(TorchSoftmax):
    """Returns another dtype than it was given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return super().forward(q, k, v, layer_id, batch).float()


class OutputIsNone(TorchSoftmax):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        super().forward(q, k, v, layer_id, batch)
        return None  # type: ignore[return-value]


def refuse() -> None:
    raise ValueError("page size must be a multiple of 256")


def run(backend: type[TorchSoftmax], claim: Claim | None = None, **capabilities: object) -> CellResult:
    """One decode cell of a row that makes ``claim`` about the mode."""
    modes = {RunnerMode.EAGER: claim} if claim is not None else {}
    claims = Capabilities(modes=modes, **capabilities)  # type: ignore[arg-type]
    row = Row(backend.__name__, AttentionKind.SOFTMAX, backend, claims, source=__file__)
    return run_cell(row, RunnerMode.EAGER, CASE, CPU, controls=(), diagnosed=False)


def test_supported_and_right_is_pass() -> None:
    assert run(TorchSoftmax, Supported()).status == "pass"


def test_supported_and_wrong_is_fail() -> None:
    result = run(WrongScale)
    assert result.status == "fail"
    assert "rows over their limit" in result.reason
    assert any(line.startswith("out of layer 0, step 0: error ") for line in result.details)


@pytest.mark.parametrize("seed", range(4))
def test_a_sampled_deferral_is_tried_on_inputs_that_show_wrong_weights(seed: int) -> None:
    """A needle's weight is 1 in many a wrong kernel, so that inputs taken in turn would find it right now and then."""
    claims = Capabilities(modes={RunnerMode.EAGER: Deferred("wrong weights", issue="tracker/1")})
    row = Row("wrong", AttentionKind.SOFTMAX, WrongScale, claims, slow_on_cpu=True, source=__file__)
    case = CASE.but(seed=seed)
    result = run_cell(row, RunnerMode.EAGER, case, CPU, controls=(), full=False)
    assert result.status == "deferred"
    assert [trial.probe for trial in result.trials] == ["peaked"]


@pytest.mark.parametrize("where", ["modes", "why_not"])
def test_a_limit_that_the_row_does_not_have_is_over_claimed(where: str) -> None:
    result = run(TorchSoftmax, REFUSAL) if where == "modes" else run(TorchSoftmax, why_not=lambda case: REFUSAL)
    assert result.status == "fail"
    assert "computes it right: the limit is over-claimed" in result.reason


def test_a_limit_on_other_cases_says_nothing() -> None:
    assert run(TorchSoftmax, why_not=lambda case: REFUSAL if case.page_size != 16 else None).status == "pass"


def test_a_limit_that_is_computed_wrong_without_refusing_is_fail() -> None:
    result = run(WrongScale, REFUSAL)
    assert result.status == "fail"
    assert "computes it wrong without refusing" in result.reason


def test_a_refusal_seen_is_blocked() -> None:
    result = run(CompiledCodeRefuses, COMPILED)
    assert (result.status, result.reason) == ("blocked", "head dim (RuntimeError seen)")


def test_a_refusal_that_was_not_declared_is_fail() -> None:
    assert run(CompiledCodeRefuses).status == "fail"


def test_a_refusal_after_a_write_is_fail() -> None:
    result = run(RefusesAfterWriting, COMPILED)
    assert result.status == "fail"
    assert "a pool was written before the refusal" in result.reason


@pytest.mark.parametrize("backend", [RaisesItself, RaisesInAHelper, RaisesInExec, RaisesByThrow], ids=lambda b: b.__name__)
def test_a_rows_own_raise_is_never_blocked(backend: type[TorchSoftmax]) -> None:
    result = run(backend, REFUSAL)
    assert result.status == "fail"
    assert "the exception was raised in" in result.reason
    assert "not by torch" in result.reason


@pytest.mark.parametrize(
    "claim",
    [
        Blocked("type", "IndexError", "multiple of 256"),
        Blocked("text", "RuntimeError", "page size must be a multiple of 128"),
    ],
    ids=["another_type", "another_text"],
)
def test_another_refusal_than_declared_is_fail(claim: Blocked) -> None:
    result = run(CompiledCodeRefuses, claim)
    assert result.status == "fail"
    assert "expected " in result.reason


@pytest.mark.parametrize("backend", [Missing, AssertsFalse, OutOfMemory], ids=lambda b: b.__name__)
@pytest.mark.parametrize("claim", [None, REFUSAL], ids=["supported", "blocked"])
def test_no_exception_is_a_skip(claim: Claim | None, backend: type[TorchSoftmax]) -> None:
    assert run(backend, claim).status == "fail"


def test_deferred_and_passing_is_fail() -> None:
    result = run(TorchSoftmax, Deferred("not yet", "issue 7"))
    assert (result.status, result.reason) == ("fail", "declared deferred (not yet), but it passes")


@pytest.mark.parametrize("backend", [WrongScale, RaisesItself], ids=lambda b: b.__name__)
def test_deferred_and_wrong_or_raising_is_deferred(backend: type[TorchSoftmax]) -> None:
    result = run(backend, Deferred("not yet", "issue 7"))
    assert (result.status, result.reason) == ("deferred", "not yet (issue 7)")


def test_a_deferral_needs_an_issue() -> None:
    with pytest.raises(ValueError, match="a deferral needs an issue"):
        Deferred("not yet", "")


def test_a_known_fault_that_passes_is_fail() -> None:
    fault = KnownFault(lambda case, mode: case == CASE, "scale", "scale is off", "scale")
    result = run(TorchSoftmax, known_faults=(fault,))
    assert (result.status, result.reason) == ("fail", "declared a known fault (scale), but it passes")


def test_a_known_fault_of_other_cases_excuses_nothing() -> None:
    fault = KnownFault(lambda case, mode: case.page_size == 1, "scale", "scale is off", "scale")
    assert run(WrongScale, known_faults=(fault,)).status == "fail"


@pytest.mark.parametrize(("holds", "status"), [(True, "n/a"), (False, "fail")])
def test_not_applicable_only_where_a_machine_sees_why(holds: bool, status: str) -> None:
    def check() -> bool:
        return holds

    checked: Callable[[], bool] = check
    assert run(TorchSoftmax, NotApplicable("no argument", checked)).status == status


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        (FlatOutput, "returned shape (3, 256), expected (3, 4, 64) (per_head)"),
        (WideOutput, "returned torch.float32 on cpu, expected torch.bfloat16"),
        (OutputIsNone, "returned NoneType, expected a tensor"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_contract_is_named(backend: type[TorchSoftmax], says: str) -> None:
    result = run(backend)
    assert result.status == "fail"
    assert says in result.reason
