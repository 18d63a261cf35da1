"""Metadata that no output can judge is held against the batch it was prepared for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.layouts import decode, extend
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import PreparedMetadata
from attnmatrix.harness.capabilities import Conventions
from attnmatrix.harness.metadata_checks import metadata_problems
from attnmatrix.harness.probes import PEAKED
from attnmatrix.harness.world import World

SOFTMAX = AttentionKind.SOFTMAX
RAGGED = extend(16, (0, 20, 33), (18, 7, 1), SOFTMAX)


def right(case: Case) -> tuple[PreparedMetadata, World]:
    """Everything a backend could show of the case's own batch, as it should be."""
    world = World(case, RunnerMode.EAGER, PEAKED, Conventions(), torch.device("cpu"))
    batch, size = world.batch(0), case.page_size
    slots = [world.slots(request, 0, length) for request, length in zip(world.steps[0].requests, case.kv_lens, strict=True)]
    pages = [own[::size] // size for own in slots]
    counts = torch.tensor([len(own) for own in pages])
    prepared = PreparedMetadata(
        cu_seqlens_q=batch.cu_seqlens_q,
        cu_seqlens_k=starts(torch.tensor(case.kv_lens)),
        cache_seqlens=torch.tensor(case.kv_lens),
        page_table=torch.nn.utils.rnn.pad_sequence(pages, batch_first=True),
        kv_indptr=starts(counts),
        kv_indices=torch.cat(pages),
        last_indices=batch.cu_seqlens_q[1:] - 1,
        positions=batch.positions,
    )
    return prepared, world


def starts(lens: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])


def problems(prepared: PreparedMetadata, world: World, live: int | None = None) -> list[str]:
    batch = world.batch(0)
    return metadata_problems(prepared, batch, world.context, batch.size if live is None else live)


@pytest.mark.parametrize("case", [RAGGED, decode(1, (2, 4), SOFTMAX), extend(16, (5, 9), (2, 0), SOFTMAX)], ids=lambda case: case.id)
def test_right_metadata_passes(case: Case) -> None:
    assert problems(*right(case)) == []


def test_slots_serve_as_kv_indices_too() -> None:
    prepared, world = right(RAGGED)
    slots = [world.slots(request, 0, length) for request, length in zip(world.steps[0].requests, RAGGED.kv_lens, strict=True)]
    by_token = replace(prepared, kv_indptr=starts(torch.tensor(RAGGED.kv_lens)), kv_indices=torch.cat(slots))
    assert problems(by_token, world) == []


@pytest.mark.parametrize(
    "field", ["cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "last_indices", "positions", "page_table", "kv_indices"]
)
def test_a_field_off_by_one_is_named(field: str) -> None:
    prepared, world = right(RAGGED)
    shifted = getattr(prepared, field).clone()
    shifted.flatten()[-1] -= 1
    lines = problems(replace(prepared, **{field: shifted}), world)
    assert lines and all(line.startswith(field) or field == "last_indices" for line in lines)


@pytest.mark.parametrize("field", ["cu_seqlens_q", "cu_seqlens_k", "kv_indptr"])
def test_starts_must_not_decrease_even_in_padded_rows(field: str) -> None:
    prepared, world = right(RAGGED)
    longer = torch.cat([getattr(prepared, field), torch.zeros(1, dtype=torch.int64)])
    assert any("decreases" in line for line in problems(replace(prepared, **{field: longer}), world))


@pytest.mark.parametrize(("length", "what"), [(-1, "negative"), (1000, "exceeds the 48 keys")])
def test_lengths_must_fit_a_table_row_even_at_capture(length: int, what: str) -> None:
    prepared, world = right(RAGGED)
    assert prepared.cache_seqlens is not None
    padded = torch.cat([prepared.cache_seqlens, torch.tensor([length])])
    assert what in problems(replace(prepared, cache_seqlens=padded), world, live=0)[0]


def test_pages_must_lie_in_the_pool() -> None:
    prepared, world = right(RAGGED)
    assert prepared.page_table is not None
    beyond = torch.cat([prepared.page_table, torch.full_like(prepared.page_table[:1], 10_000)])
    assert "the pool has" in problems(replace(prepared, page_table=beyond), world)[0]


def test_a_field_that_a_backend_does_not_show_is_not_judged() -> None:
    _, world = right(RAGGED)
    assert problems(PreparedMetadata(), world) == []
