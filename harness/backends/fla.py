"""Row ``fla``: flash-linear-attention's recurrent kernel for simple gated linear attention, which is Lightning attention with fixed gates.

The package has no state pool: a request's state is an argument and a result. So states are taken from their slots before the one kernel call
of a layer and put back after it, which is what an engine has to do around this package too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.capabilities import Capabilities, Claim, NotApplicable
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


def load_kernel() -> Callable[..., Any]:
    """Importing the package needs a GPU: its autotuners ask for the driver."""
    from fla.ops.simple_gla.fused_recurrent import fused_recurrent_simple_gla

    kernel: Callable[..., Any] = fused_recurrent_simple_gla
    return kernel


class Fla(AttentionBackend):
    """``fused_recurrent_simple_gla`` with ``g_gamma``, the log decay per head; one call per layer and batch."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        assert context.slopes is not None
        self._kernel = load_kernel()
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
            cu_seqlens=meta.cu_seqlens,
        )
        self._put_back(pool, meta.state_indices, final)
        result: Tensor = out[0]
        return result

    @staticmethod
    def _put_back(pool: Tensor, slots: Tensor, states: Tensor) -> None:
        """Write ``states`` ``[R, H, K, V]`` to their slots through a select over the pool, since -1 is no index and a graph cannot skip."""
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


def _returns_one_state() -> bool:
    """The kernel function takes no buffer for states in between: the names in its file, which a CPU cannot import."""
    source = installed_file("fla-core", "ops/simple_gla/fused_recurrent.py").read_text()
    signature = source[source.index("def fused_recurrent_simple_gla(") :].split(") ->", 1)[0]
    return not any(word in signature for word in ("intermediate", "track", "cache"))


def _why_not(case: Case) -> Claim | None:
    if any(case.track_lens):
        return NotApplicable("returns the final state only: no snapshots", _returns_one_state)
    return None


DRAFTS = NotApplicable("returns the final state only: no state per draft token", _returns_one_state)

SNIPPET = """
from fla.ops.simple_gla.fused_recurrent import fused_recurrent_simple_gla

def attend(q, k, v, states, slots, starts, prefix, new, slopes, scale):
    initial = torch.stack([states[s].float() if p else torch.zeros_like(states[s]).float() for s, p in zip(slots.tolist(), prefix)])
    out, final = fused_recurrent_simple_gla(
        q[None], k[None], v[None], g_gamma=-slopes, scale=scale, initial_state=initial, output_final_state=True, cu_seqlens=starts.long()
    )
    for s, state, n in zip(slots.tolist(), final, new):
        if n:
            states[s] = state
    return out[0]
"""

register(
    Row(
        name="fla",
        kind=AttentionKind.LIGHTNING,
        create=Fla,
        capabilities=Capabilities(modes={RunnerMode.VERIFY: DRAFTS, RunnerMode.VERIFY_CG: DRAFTS}, why_not=_why_not),
        distributions=("fla-core", "triton"),
        devices=("cuda",),
        summary="flash-linear-attention, simple GLA, recurrent kernel",
        snippet=SNIPPET,
        source=__file__,
    )
)
