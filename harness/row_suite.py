"""Which cases make up a row's cell on a device.

Triton kernels in the interpreter, and kernels that are meant to be compiled, run thousands of times slower on a CPU than on a GPU. There, and
only by default, a cell is *sampled*: of the cases within a bound on their work, in eager modes a pairwise-covering subset of what should pass
and a sparser one of the rest, in graph modes a subset, of what should pass, that still meets every single value of the axes that a runner
can get wrong, and one case of a known fault. Interpreted kernels run in float32 (exact: a right kernel errs by rounding units, a wrong
index shows), in graph modes with one or two small heads. Graph modes of every row are sampled on a CPU, whose graphs are a stand-in.
``full`` runs everything. States in bfloat16 are left to a GPU: the interpreter cuts a float to bfloat16 where a GPU rounds it, which adds up
from step to step and says nothing about the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.pairwise import pairwise_subset, runner_subset, single_subset, work
from attnmatrix.cases.suites import gpu_suite, suite
from attnmatrix.harness.capabilities import Supported
from attnmatrix.harness.registry import Row

SLOW_GRAPHS = 2  # cases of a graph mode on a CPU for kernels that a CPU does not compile
EAGER_WORK, GRAPH_WORK = 8_000_000, 1_000_000  # see ``work``: a few seconds of interpreted kernels each


def is_sampled(row: Row, device: str, full: bool) -> bool:
    """Whether a row's cells are sampled: kernels that crawl on a CPU, unless everything was asked for."""
    return (row.interpreted or row.slow_on_cpu or row.few_on_cpu) and device == "cpu" and not full


def row_suite(row: Row, mode: RunnerMode, device: str, full: bool) -> tuple[Case, ...]:
    """The cases of one cell on a ``device`` type."""
    whole = suite(row.kind, mode) if device == "cpu" else gpu_suite(row.kind, mode)
    if row.interpreted and device == "cpu":
        whole = tuple(case for case in whole if case.state_dtype is None)
        exact = tuple({case.id: case for case in (_exact(case) for case in whole)}.values())
        whole = tuple({case.id: case for case in (*whole, *exact)}.values()) if full else exact
    if not is_sampled(row, device, full):
        return runner_subset(whole) if mode.uses_graph and device == "cpu" and not full else whole
    if row.interpreted and mode.uses_graph:
        whole = tuple({case.id: case for case in (_narrow(case) for case in whole)}.values())
    bound = GRAPH_WORK if mode.uses_graph or row.few_on_cpu else EAGER_WORK
    cheap = tuple(case for case in whole if work(case) <= bound)
    if mode.uses_graph:
        cheap = tuple(case for case in cheap if case.kv_dtype is None)  # what a cache holds is the kernel's affair
        known = tuple(case for case in cheap if has_known_fault(row, mode, case))
        right = runner_subset(tuple(case for case in cheap if case not in known), fewest=True)
        if row.slow_on_cpu:
            right = tuple(sorted(right, key=work)[-SLOW_GRAPHS:])
        return (*right, *sorted(known, key=work)[:1])
    if row.few_on_cpu:
        return single_subset(cheap)
    right = tuple(case for case in cheap if should_pass(row, mode, case, device))
    rest = tuple(case for case in cheap if case not in right and work(case) <= bound // 2)
    kept = {*pairwise_subset(right), *single_subset(rest)}
    return tuple(case for case in cheap if case in kept)


def in_dtypes_of(row: Row, cases: Iterable[Case]) -> tuple[Case, ...]:
    """Those of the cases whose dtype the row is for."""
    return tuple(case for case in cases if row.dtypes is None or case.dtype in row.dtypes)


@lru_cache(maxsize=4096)
def should_pass(row: Row, mode: RunnerMode, case: Case, device: str) -> bool:
    """Whether the row claims the case and no known fault is in it: what else a case meets says nothing about the row."""
    return isinstance(row.capabilities.claim(mode, case, device), Supported) and not has_known_fault(row, mode, case)


@lru_cache(maxsize=4096)
def has_known_fault(row: Row, mode: RunnerMode, case: Case) -> bool:
    """Whether a fault found in the package applies to the case or to a batch derived from it."""
    return row.capabilities.known_fault(mode, case) is not None


def _narrow(case: Case) -> Case:
    """A graph mode's case with two small heads: a runner does not see them, and the interpreter runs one program for each. Lightning has one
    of dim 128 outside verify, where some batch of each schedule is decoded, for which there is a lower bound."""
    if case.kind is AttentionKind.SOFTMAX:
        return case.but(heads=Heads(2, 1, 64), name=case.name)
    if case.forward is not ForwardMode.TARGET_VERIFY or 1 in case.new_lens:
        return case.but(heads=Heads(1, 1, 128), shard=(0, 1), name=case.name)
    return case.but(heads=Heads(2, 2, 64), shard=(0, 1), name=case.name)


def _exact(case: Case) -> Case:
    """A bf16 case in float32; the suite's own dtype variants stay."""
    return case.but(dtype="fp32", name=case.name) if case.dtype == "bf16" and not case.name.startswith("bf16") else case
