"""Pools: a stored token is read back at its slot in every layout, and a write past either end is seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnmatrix.harness.pools import Fenced, KVPool, StatePool, bits

CPU = torch.device("cpu")
LAYOUTS = ("NHD", "HND", "interleaved")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def kv_pool(layout: str, dtype: torch.dtype = torch.float32) -> KVPool:
    pool = KVPool(5, 4, 2, 3, 2, dtype, CPU, layout)
    for layer in (0, 1):
        pool.k(layer).zero_()
        pool.v(layer).zero_()
    return pool


def physical(pool: KVPool, which: str, layer: int, slot: int) -> Tensor:
    """``[H, D]`` of one slot, indexed as the layout's definition says."""
    page, offset = divmod(slot, pool.page_size)
    if pool.layout == "interleaved":
        return pool.kv(layer)[page, "kv".index(which), offset]
    tensor = pool.k(layer) if which == "k" else pool.v(layer)
    return tensor[page, :, offset] if pool.layout == "HND" else tensor[page, offset]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_store_and_read_back(layout: str) -> None:
    pool = kv_pool(layout)
    slots = torch.tensor([19, 0, 6])
    k, v = torch.arange(1.0, 19).view(3, 2, 3), -torch.arange(1.0, 19).view(3, 2, 3)
    pool.store(1, slots, k, v)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(physical(pool, "k", 1, slot), k[row])
        assert torch.equal(physical(pool, "v", 1, slot), v[row])
        assert torch.equal(pool.by_page(pool.k(1))[slot // 4, slot % 4], k[row])
    assert pool.k(1).sum() == k.sum()
    assert pool.v(1).sum() == v.sum()
    assert not pool.k(0).any()
    assert not pool.v(0).any()


@pytest.mark.parametrize(("layout", "shape"), [("NHD", (5, 4, 2, 3)), ("HND", (5, 2, 4, 3))])
def test_physical_shapes(layout: str, shape: tuple[int, ...]) -> None:
    pool = kv_pool(layout)
    assert pool.k(0).shape == pool.v(1).shape == shape
    assert pool.k(0).is_contiguous()
    assert pool.num_slots == 20


def test_interleaved_halves_are_views_of_one_buffer() -> None:
    pool = kv_pool("interleaved")
    assert pool.kv(0).shape == (5, 2, 4, 2, 3)
    pool.kv(0)[3, 1] = 7.0
    assert (pool.v(0)[3] == 7.0).all()
    assert not pool.k(0).any()


def test_a_stored_token_takes_the_pools_dtype() -> None:
    pool = kv_pool("NHD", torch.float8_e4m3fn)
    pool.store(0, torch.tensor([5]), torch.full((1, 2, 3), 1.1), torch.full((1, 2, 3), -2.0))
    assert pool.k(0)[1, 1].float().unique().item() == 1.125
    assert pool.v(0)[1, 1].float().unique().item() == -2.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [-1, -256, 24, 279], ids=["before", "far_before", "after", "far_after"])
def test_a_canary_sees_a_write_on_either_side(dtype: torch.dtype, offset: int) -> None:
    fenced = Fenced((2, 3, 4), dtype, CPU)
    assert fenced.tensor.shape == (2, 3, 4)
    assert not fenced.broken()
    bits(fenced.tensor).fill_(1)
    assert not fenced.broken()
    outside = bits(fenced.tensor).as_strided((1,), (1,), fenced.tensor.storage_offset() + offset)
    outside.fill_(0)
    assert fenced.broken()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kv_buffer_is_fenced(layout: str) -> None:
    pool = kv_pool(layout)
    buffers = [pool.k(0), pool.k(1), pool.v(0), pool.v(1)]
    fenced = {fence.tensor.untyped_storage().data_ptr() for fence in pool.fenced}
    assert {buffer.untyped_storage().data_ptr() for buffer in buffers} == fenced


@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_every_state_buffer_is_fenced_and_seen_as_kv(layout: str) -> None:
    pool = StatePool(4, 2, 3, 2, torch.float32, CPU, layout, 2, 5)
    assert pool.state(0).shape == (4, 2, 3, 3)
    assert pool.intermediate(1).shape == (2, 5, 2, 3, 3)
    assert len(pool.fenced) == 4
    state = torch.arange(9.0).view(3, 3)
    pool.as_kv(pool.state(1))[2, 0] = state
    assert torch.equal(pool.state(1)[2, 0], state if layout == "KV" else state.T)


def test_bits_tell_apart_what_compares_equal() -> None:
    assert (bits(torch.tensor([0.0])) != bits(torch.tensor([-0.0]))).all()
    assert (bits(torch.tensor([float("nan")])) == bits(torch.tensor([float("nan")]))).all()
