"""FlashInfer's TensorRT-LLM row on a CPU, over a strict stand-in for the package's XQA entry point."""

from __future__ import annotations

from dataclasses import replace

import pytest
import strict_flashinfer
import torch
from flashinfer_cells import CG, CPU, DECODE, EAGER, SOFTMAX, VERIFY, VERIFY_CG, XQA, cell

from attnmatrix.cases.ids import parse_case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backends.flashinfer_trtllm import Trtllm, draft_mask
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.capabilities import Blocked
from attnmatrix.harness.controls import CONTROLS
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.trial import run_trial


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    strict_flashinfer.install(monkeypatch)


@pytest.mark.parametrize(("mode", "case"), XQA)
def test_cell(mode: RunnerMode, case: str) -> None:
    result = cell("trtllm", mode, case)
    assert result.status == "pass", (result.reason, *result.details)
    assert all(trial.graph == "tape" for trial in result.trials) or not mode.uses_graph


@pytest.mark.parametrize(("mode", "case"), [(CG, f"{DECODE}-w8"), (VERIFY_CG, XQA[-1][1])])
def test_every_control_is_rejected(mode: RunnerMode, case: str) -> None:
    controls = [control for control in CONTROLS if control.applies(parse_case(case))]
    result = cell("trtllm", mode, case, controls)
    assert result.status == "pass", (result.reason, *result.details)
    assert result.controls
    assert all(count.rejected == count.tried and not count.raised for count in result.controls.values())


class StaleTables(Trtllm):
    """Keeps the page table of the capture."""

    def prepare_for_replay(self, batch: Batch) -> None:
        self._static[batch.padded_reqs].cache_seqlens.copy_(batch.attn_metadata.cache_seqlens)
        batch.attn_metadata = self._static[batch.padded_reqs]


def test_a_mistake_of_the_adapter_is_found() -> None:
    assert cell(replace(find_row("trtllm", SOFTMAX), create=StaleTables), CG, DECODE).status == "fail"


@pytest.mark.parametrize(
    ("mode", "case", "said"),
    [
        (EAGER, "extend-p16-prefix0-new16-h4x2x64-bf16-shuffled", "Artifact not found locally"),
        (EAGER, "decode-p1-prefix5-new1-h4x2x64-bf16-shuffled", "Invalid page_size: 1, only 16, 32, 64, 128"),
        (VERIFY, "target_verify-p16-prefix18.5.40-new2.5.3-h4x2x64-bf16-shuffled", "does not support cum_seq_lens_q"),
    ],
)
def test_a_declared_refusal_reaches_the_caller(mode: RunnerMode, case: str, said: str) -> None:
    row, parsed = find_row("trtllm", SOFTMAX), parse_case(case)
    claim = row.capabilities.claim(mode, parsed, "cuda")
    trial = run_trial(row, mode, parsed, CPU, PEAKED)
    assert isinstance(claim, Blocked)
    assert type(trial.error).__name__ == claim.exception
    assert trial.untouched
    assert said in str(trial.error)


def test_words_of_a_mask_hold_the_lowest_bit_first() -> None:
    seen = torch.ones(40, 40, dtype=torch.bool).tril().repeat(2, 1)
    packed = draft_mask(seen, 40)
    assert tuple(packed.shape) == (2, 40, 2)
    assert packed[1, :3, 0].tolist() == [1, 3, 7]
    assert packed[0, 31:34].tolist() == [[-1, 0], [-1, 1], [-1, 3]]
