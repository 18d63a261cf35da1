"""Rows ``fla``, ``fla-vk`` and ``fla-chunk``: flash-linear-attention's kernels for simple gated linear attention, which is Lightning attention
with fixed gates. The first two go token by token, on states ``[K, V]`` and ``[V, K]``; the third takes 64 tokens at a time.

The package has no state pool: a request's state is an argument and a result. So states are taken from their slots before the one kernel call
of a layer and put back after it, which is what an engine has to do around this package too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.capabilities import Capabilities, Claim, Conventions, NotApplicable, RoundingStep
from attnmatrix.harness.installed import installed_file
from attnmatrix.harness.lazy import torch
from attnmatrix.harness.registry import Row, register

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch
    from attnmatrix.harness.context import Context


@dataclass
class FlaMetadata:
    """All on gpu. In graph modes these are the captured buffers."""

    cu_seqlens: Tensor  # int64 [R + 1]
    state_indices: Tensor  # int32 [R], -1 for padding and for requests without a new token
    has_prefix: Tensor  # bool [R]

    def get_last_indices(self, bs: int) -> Tensor:
        return self.cu_seqlens[1 : bs + 1] - 1


RECURRENT, CHUNK = "fused_recurrent", "chunk"  # the package's two forms: a file and the function ``FORM_simple_gla`` in it


def load_kernel(form: str) -> Callable[..., Any]:
    """Importing the package needs a GPU: its autotuners ask for the driver."""
    kernel: Callable[..., Any] = getattr(importlib.import_module(f"fla.ops.simple_gla.{form}"), f"{form}_simple_gla")
    return kernel


class Fla(AttentionBackend):
    """One form with ``g_gamma``, the log decay per head; one call per layer and batch."""

    def __init__(self, context: Context, form: str = RECURRENT) -> None:
        super().__init__(context)
        assert context.slopes is not None
        assert context.states is not None
        self._kernel = load_kernel(form)
        self._v_first = context.states.layout == "VK"
        self._log_decay = [-slopes for slopes in context.slopes]

    def prepare_metadata(self, batch: Batch) -> None:
        assert batch.state_indices is not None
        lengths = batch.cu_seqlens_q.diff()
        slots = torch.where(lengths > 0, batch.state_indices, -1)
        batch.attn_metadata = FlaMetadata(batch.cu_seqlens_q.long(), slots, batch.seq_lens > lengths)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        context, meta = self.context, batch.attn_metadata
        assert context.states is not None
        if not batch.num_tokens:
            return torch.empty_like(q)
        pool = context.states.state(layer_id)
        initial = torch.where(meta.has_prefix[:, None, None, None], pool[meta.state_indices.clamp(min=0).long()].float(), 0.0)
        out, final = self._kernel(
            q[None],
            k[None],
            v[None],
            g_gamma=self._log_decay[layer_id],
            scale=context.scale,
            initial_state=initial,
            output_final_state=True,
            state_v_first=self._v_first,
            cu_seqlens=meta.cu_seqlens,
        )
        self._put_back(pool, meta.state_indices, final)
        result: Tensor = out[0]
        return result

    @staticmethod
    def _put_back(pool: Tensor, slots: Tensor, states: Tensor) -> None:
        """Write ``states``, in the pool's layout, to their slots through a select over the pool, since -1 is no index and a graph cannot skip."""
        hit = slots[:, None] == torch.arange(pool.shape[0], device=pool.device)[None, :]
        chosen = states[hit.int().argmax(dim=0)].to(pool.dtype)
        pool.copy_(torch.where(hit.any(dim=0)[:, None, None, None], chosen, pool))

    def inspect_metadata(self, batch: Batch) -> PreparedMetadata:
        return PreparedMetadata(cu_seqlens_q=batch.attn_metadata.cu_seqlens)

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        device, width = self.context.device, self.context.tokens_per_request
        self._static = {
            size: FlaMetadata(
                torch.arange(size + 1, dtype=torch.int64, device=device) * width,
                torch.full((size,), -1, dtype=torch.int32, device=device),
                torch.ones(size, dtype=torch.bool, device=device),
            )
            for size in batch_sizes
        }

    def prepare_for_capture(self, batch: Batch) -> None:
        batch.attn_metadata = self._static[batch.padded_reqs]

    def prepare_for_replay(self, batch: Batch) -> None:
        static, fresh = self._static[batch.padded_reqs], batch.attn_metadata
        for name in ("cu_seqlens", "state_indices", "has_prefix"):
            getattr(static, name).copy_(getattr(fresh, name))


def _signature(form: str) -> str:
    """Of a kernel function, as its file spells it: a CPU cannot import it."""
    source = installed_file("fla-core", f"ops/simple_gla/{form}.py").read_text()
    return source[source.index(f"def {form}_simple_gla(") :].split(") ->", 1)[0]


def _returns_one_state(form: str) -> bool:
    """The kernel function takes no buffer for states in between."""
    return not any(word in _signature(form) for word in ("intermediate", "track", "cache"))


def _counts_chunks_on_the_host() -> bool:
    """The number of chunks, which sizes a buffer, is read back from the device."""
    source = installed_file("fla-core", "ops/common/chunk_h.py").read_text()
    return ".item()" in source[source.index("def chunk_fwd_h(") :].split("\ndef ", 1)[0]


def _capabilities(form: str) -> Capabilities:
    one_state = partial(_returns_one_state, form)
    drafts = NotApplicable("returns the final state only: no state per draft token", one_state)
    modes: dict[RunnerMode, Claim] = {RunnerMode.VERIFY: drafts, RunnerMode.VERIFY_CG: drafts}
    if form == CHUNK:
        modes[RunnerMode.CG_DECODE] = NotApplicable("counts chunks on the host, which no graph can hold", _counts_chunks_on_the_host)

    def why_not(case: Case) -> Claim | None:
        return NotApplicable("returns the final state only: no snapshots", one_state) if any(case.track_lens) else None

    return Capabilities(modes=modes, why_not=why_not)


ROUNDING: dict[str, tuple[RoundingStep, ...]] = {
    RECURRENT: (),
    CHUNK: (
        RoundingStep(
            "state read by a chunk of 64, decayed scores and decayed values in the input dtype",
            "chunk_h.py, chunk_fwd_h: states_in_fp32=False, h = k.new_empty(..., dtype=k.dtype); chunk_fwd_kernel_h: "
            "b_v = (b_v * exp2(b_g_last - b_g)[:, None]).to(b_v.dtype); chunk_o.py, chunk_fwd_kernel_o: tl.dot(b_A.to(b_v.dtype), b_v)",
        ),
        RoundingStep(
            "products of factors cut to TF32",
            "chunk_fwd_kernel_h: tl.dot(b_k, b_v, b_h), chunk_fwd_kernel_o: tl.dot(b_q, b_h, b_o), tl.dot(b_q, b_k, b_A) of float32 operands",
            lambda case, device: device == "cuda" and case.dtype == "fp32",
        ),
    ),
}

SNIPPET = """
from fla.ops.simple_gla.FORM import FORM_simple_gla

def attend(q, k, v, states, slots, starts, prefix, new, slopes, scale):
    initial = torch.stack([states[s].float() if p else torch.zeros_like(states[s]).float() for s, p in zip(slots.tolist(), prefix)])
    kept = {"initial_state": initial.mT.contiguous() if V_FIRST else initial, "state_v_first": V_FIRST, "output_final_state": True}
    out, final = FORM_simple_gla(q[None], k[None], v[None], g_gamma=-slopes, scale=scale, cu_seqlens=starts.long(), **kept)
    for s, state, n in zip(slots.tolist(), final, new):
        if n:
            states[s] = state.mT if V_FIRST else state
    return out[0]
"""

for name, form, layout, summary in (
    ("fla", RECURRENT, "KV", "recurrent kernel"),
    ("fla-vk", RECURRENT, "VK", "recurrent kernel on [V, K] states"),
    ("fla-chunk", CHUNK, "KV", "chunk form"),
):
    register(
        Row(
            name=name,
            kind=AttentionKind.LIGHTNING,
            create=partial(Fla, form=form),
            capabilities=_capabilities(form),
            conventions=Conventions(state_layout=layout, rounding=ROUNDING[form]),
            distributions=("fla-core", "triton"),
            devices=("cuda",),
            summary=f"flash-linear-attention, simple GLA, {summary}",
            snippet=SNIPPET.replace("FORM", form).replace("V_FIRST", str(layout == "VK")),
            source=__file__,
        )
    )
