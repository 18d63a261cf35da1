"""The same rules on a GPU: real CUDA graphs, one or several, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from attnmatrix.cases.case import AttentionKind, Case, Heads
from attnmatrix.cases.layouts import decode, extend
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.speculative import SIBLINGS, verify
from attnmatrix.harness.graphs import GraphMaker, capturing, warm_up
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.registry import find_row
from attnmatrix.harness.trial import describe, run_trial

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")
CASES = {
    RunnerMode.CG_DECODE: decode(16, (40, 20, 33), AttentionKind.SOFTMAX),
    RunnerMode.VERIFY_CG: verify(16, (14, 31), 6, AttentionKind.SOFTMAX, trees=(SIBLINGS,)),
    RunnerMode.PCG_EXTEND: extend(16, (0, 20, 33), (18, 7, 1), AttentionKind.SOFTMAX),
    RunnerMode.BCG_EXTEND: extend(16, (0, 20, 33), (18, 7, 1), AttentionKind.SOFTMAX),
}


def linear(case: Case) -> Case:
    return case.but(kind=AttentionKind.LIGHTNING, heads=Heads(2, 2, 128))


def test_a_graph_has_run_once_when_its_capture_ends_and_runs_again_on_new_inputs() -> None:
    graph, source = GraphMaker(CUDA)(), torch.ones(4, device=CUDA)
    warm_up(CUDA, lambda: source * 2)
    with capturing(graph):
        out = source * 2
    assert (graph.kind, out.tolist()) == ("cuda", [2.0] * 4)
    source.fill_(5.0)
    graph.replay()
    assert out.tolist() == [10.0] * 4


def test_segments_of_one_pool_feed_each_other() -> None:
    make, source = GraphMaker(CUDA), torch.ones(4, device=CUDA)
    first, second = make(), make()
    with capturing(first):
        middle = source + 1
    host = middle * 10
    with capturing(second):
        out = middle + host
    for value in (3.0, 7.0):
        source.fill_(value)
        first.replay()
        host.copy_(middle * 10)
        second.replay()
        assert out.tolist() == [(value + 1) * 11] * 4


def test_a_refused_capture_leaves_the_process_fit_for_the_next() -> None:
    source = torch.ones(4, device=CUDA)
    with pytest.raises(RuntimeError), capturing(GraphMaker(CUDA)()):
        (source * 2).tolist()
    graph = GraphMaker(CUDA)()
    with capturing(graph):
        out = source * 3
    source.fill_(2.0)
    graph.replay()
    assert out.tolist() == [6.0] * 4


@pytest.mark.parametrize("mode", CASES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("kind", AttentionKind, ids=lambda kind: kind.value)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_torch_rows_pass_in_cuda_graphs(mode: RunnerMode, kind: AttentionKind, dtype: str) -> None:
    case = (CASES[mode] if kind is AttentionKind.SOFTMAX else linear(CASES[mode])).but(dtype=dtype)
    result = run_trial(find_row("torch", kind), mode, case, CUDA, PEAKED)
    assert result.passed, describe(result)
    assert (result.graph, result.replays) == ("cuda", 6)
