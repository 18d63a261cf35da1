"""``attnmatrix new-backend``: a row to fill in."""

from __future__ import annotations

import re
from pathlib import Path

from attnmatrix.harness.registry import UsageError, known_names

TEMPLATE = '''"""Row ``{name}``: one line on the package and the functions that are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend
from attnmatrix.harness.capabilities import Blocked, Capabilities, Conventions, Deferred
from attnmatrix.harness.context import Context
from attnmatrix.harness.lazy import torch
from attnmatrix.harness.registry import Row, register

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.harness.batch import Batch


class {cls}(AttentionBackend):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        import {package}  # imported here: listing rows must not import packages

        self.package = {package}

    def prepare_metadata(self, batch: Batch) -> None:
        # Runs once per batch and serves every layer. req_to_token holds slots; kernels mostly want pages.
        context = self.context
        width = -(-max(batch.kv_lens, default=1) // context.page_size)
        columns = torch.arange(width, device=context.device) * context.page_size
        page_table = context.req_to_token[batch.req_pool_indices[:, None], columns[None, :]] // context.page_size
        cache_seqlens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=context.device)
        batch.attn_metadata = (page_table, cache_seqlens)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        context, (page_table, cache_seqlens) = self.context, batch.attn_metadata
        context.kv.store(layer_id, batch.out_loc, k, v)  # write first, then read
        return self.package.paged_attention(
            q,
            context.kv.k(layer_id),
            context.kv.v(layer_id),
            cu_seqlens_q=batch.cu_seqlens_q,
            cache_seqlens=cache_seqlens,
            page_table=page_table,
            softmax_scale=context.scale,
            window=context.windows[layer_id],
            causal=True,
        )


def why_not(case: Case) -> Blocked | None:
    """The package's own limits. Each is run all the same: the package must raise this, with this text."""
    if case.page_size % 16:
        return Blocked("pages must be multiples of 16", "ValueError", "page size")
    return None


register(
    Row(
        name="{name}",
        kind=AttentionKind.SOFTMAX,
        create={cls},
        capabilities=Capabilities(
            modes={{mode: Deferred("graph hooks are not written", "TODO: issue") for mode in (RunnerMode.CG_DECODE, RunnerMode.VERIFY_CG)}},
            why_not=why_not,
        ),
        conventions=Conventions(kv_layout="NHD", output="per_head", window="inclusive"),
        distributions=("{package}", "torch"),
        devices=("cuda",),
        summary="",
        source=__file__,
    )
)
'''


def write_row(name: str, out: Path | None) -> str:
    """Write the template for ``name``; returns what to do next. Raises UsageError for a taken or unusable name or file."""
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
        raise UsageError(f"backend name {name!r}: expected lower-case letters, digits, '-' and '_'")
    if name in known_names():
        raise UsageError(f"backend {name!r} exists already; known: {', '.join(known_names())}")
    package = re.sub(r"\W", "_", name)
    target = out or Path(f"{package}.py")
    if target.exists():
        raise UsageError(f"{str(target)!r} exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(TEMPLATE.format(name=name, package=package, cls=package.title().replace("_", "") + "Backend"))
    return f"wrote {target}; fill it in, then: attnmatrix run --plugin {target} --backend {name} --mode eager"
