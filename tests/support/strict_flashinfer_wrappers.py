"""What the strict stand-in's wrappers for paged prefill and decode share: FlashInfer's checks and buffers, and faults of its kernels.

Attention reads the lists in the wrapper's buffers, and gives NaN where they are not those of the last plan, since the kernels walk the plan.
Not modelled: how work is split but that it is, and the package's refusals but for masks on fa3.
"""

from __future__ import annotations

from typing import Any

import torch
from strict_flashinfer_attention import attention, by_lanes
from torch import Tensor

MODULES: set[tuple[Any, ...]] = set()
BLOCK = 64  # dims that fa2's kernels move at a time; the package's hold anything in the rest, here it is left out of scores
INFINITY, TILE = 5e4, 96  # what the package's math.cuh calls infinity; keys per tile of fa3's paged kernels
MERGED = (64, 128, 256, 512)  # head dims of which parts can be merged
LANES = (8, 16, 32)  # threads per head over which CUDA-core decode adds scores rightly
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def ints(name: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    assert tensor.dtype is torch.int32, f"{name} is {tensor.dtype}"
    assert tensor.is_contiguous() and tensor.ndim == 1, f"{name} is no plain vector"
    assert shape is None or tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}, expected {shape}"
    return tensor


def get_batch_prefill_attention_sink_uri(
    backend: str, dtype_q: Any, dtype_kv: Any, dtype_o: Any, dtype_idx: Any, head_dim_qk: int, head_dim_vo: int, pos_encoding_mode: int, use_sliding_window: bool
) -> str:  # fmt: skip
    """A name that tells such modules apart."""
    return f"sinks_{backend}_{dtype_q}_{head_dim_qk}_{use_sliding_window}"


def determine_attention_backend(device: Any, pos_encoding_mode: int, use_fp16_qk_reductions: bool, use_custom_mask: bool, dtype_q: Any, dtype_kv: Any) -> str:  # fmt: skip
    """What the package takes on SM 9.0."""
    return "fa2" if use_custom_mask or pos_encoding_mode else "fa3"


class Wrapper:
    """What the two wrappers share: workspaces, buffers fixed or not, checks of a run."""

    _tensor_cores = True

    def _make(self, workspace: Tensor, layout: str, graph: bool, buffers: dict[str, Tensor | None]) -> None:
        assert workspace.dtype is torch.uint8 and workspace.ndim == 1 and workspace.is_contiguous()
        assert layout in ("NHD", "HND")
        self._workspace, self._layout, self._graph, self._planned = workspace, layout, graph, None
        if graph:
            assert all(tensor is not None for tensor in buffers.values()), "a graph needs every buffer"
        self._bufs: dict[str, Any] = dict(buffers)

    def _take(self, **lists: Tensor) -> None:
        """A fixed buffer is written, any other replaced by the caller's own tensor."""
        self._split = not self._graph and int(lists["kv_indptr"].diff().max()) > max(128 // self._page, 1)
        for name, given in lists.items():
            if not self._graph:
                self._bufs[name] = given
            elif name == "kv_indices":
                assert len(given) <= len(self._bufs[name]), "more pages than the buffer holds"
                self._bufs[name][: len(given)].copy_(given)
            else:
                assert given.shape == self._bufs[name].shape, f"{name}: the batch size of a graph is fixed"
                self._bufs[name].copy_(given)
        plan = torch.cat([self._bufs[name] for name in ("qo_indptr", "kv_indptr", "last_page_len")])
        if self._graph and self._planned is not None:
            self._planned.copy_(plan)
        else:
            self._planned = plan.clone()

    def _attend(self, q: Tensor, cache: Any, out: Any, lse: Any, return_lse: bool, **how: Any) -> Any:
        assert self._planned is not None, "run before plan"
        assert isinstance(cache, tuple) and cache[0].stride() == cache[1].stride()
        assert q.dtype is self._q_dtype and cache[0].dtype is cache[1].dtype is self._kv_dtype
        assert q.stride(-1) == 1 and q.shape[1:] == (self._heads[0], self._heads[2])
        page, heads = (cache[0].shape[1:3]) if self._layout == "NHD" else cache[0].shape[1:3][::-1]
        assert (page, heads, cache[0].shape[3]) == (self._page, *self._heads[1:]), "the pool is not what was planned for"
        assert lse is None and out.shape == q.shape and out.dtype is q.dtype and out.is_contiguous()
        self._workspace[:64].fill_(7)  # partial results
        k_scale, v_scale = how.pop("scales")
        how["scale"] *= 1.0 if k_scale is None else k_scale
        bufs = self._bufs
        lists = bufs["qo_indptr"], bufs["kv_indptr"], bufs["kv_indices"], bufs["last_page_len"]
        moved = q.shape[-1]
        if self._backend != "fa3":
            if moved not in MERGED and (self._graph or self._split):
                raise RuntimeError(f"Error in function 'VariableLengthMergeStates' at cascade.cuh:697: Unsupported head_dim: {moved}")
            moved -= moved % BLOCK
        if self._tensor_cores:
            how |= {"infinity": INFINITY, "tile": TILE if self._backend == "fa3" else 0}
        attend = attention if self._tensor_cores or moved // 8 in LANES else by_lanes
        found, found_lse = attend(q[..., :moved], tuple(pool[..., :moved] for pool in cache), self._layout, *lists, **how)
        stale = (torch.cat([lists[0], lists[1], lists[3]]) != self._planned).any()
        out[..., :moved].copy_(torch.where(stale, float("nan"), found) * (1.0 if v_scale is None else v_scale))
        return (out, found_lse) if return_lse else out

    def _options(
        self, heads: tuple[int, int, int], page: int, pos: str, window_left: int, cap: float | None, dtypes: Any, scale: Any
    ) -> None:
        assert pos in ("NONE", "ALIBI") and heads[0] % heads[1] == 0
        assert isinstance(window_left, int) and window_left >= -1
        self._heads, self._page, (self._q_dtype, self._kv_dtype) = heads, page, dtypes
        self._how = {"window_left": window_left, "soft_cap": cap or 0.0, "alibi": pos == "ALIBI", "scale": scale or heads[2] ** -0.5}

    def _module(self, backend: str) -> tuple[Any, ...]:
        how = self._how
        quantised = "fp8e4m3" if self._kv_dtype is torch.float8_e4m3fn else ""
        return (
            "prefill",
            backend,
            DTYPES[self._q_dtype],
            quantised,
            self._heads[2],
            how["alibi"],
            how["window_left"] >= 0,
            how["soft_cap"] > 0,
        )
