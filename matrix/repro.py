"""``attnmatrix repro``: a stand-alone script that shows what a row does with a case, with torch and the row's package only."""

from __future__ import annotations

from pathlib import Path

import jinja2

from attnmatrix.cases.case import AttentionKind, Case
from attnmatrix.cases.placement import plan_pool
from attnmatrix.harness.dtypes import TORCH_DTYPES
from attnmatrix.harness.measure import UNINFORMATIVE
from attnmatrix.harness.registry import Row, UsageError
from attnmatrix.matrix.environment import row_versions
from attnmatrix.references.slopes import lightning_slopes

MAX_LINES = 60


def repro_script(row: Row, case: Case, reason: str = "") -> str:
    """The script's text, at most ``MAX_LINES`` lines. Raises UsageError when the row gives no snippet or the case does not fit one.

    Only plain batches fit (chains, no ALiBi, no fp8): what a stand-alone reader can check at a glance. The script exits with 1 when its error
    passes the level at which a row of that dtype says nothing more (``measure.UNINFORMATIVE``).
    """
    if not row.snippet:
        raise UsageError(f"backend {row.name!r} has no stand-alone snippet (Row.snippet)")
    if case.trees or case.alibi or case.kv_dtype or not case.num_tokens:
        raise UsageError("a stand-alone script covers chains without ALiBi and fp8 KV, with at least one new token")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    plan = plan_pool([case])
    dtype = TORCH_DTYPES[case.dtype]
    text = environment.get_template(f"repro_{case.kind.value}.py.j2").render(
        backend=row.name,
        case=case,
        reason=reason or "Compares the package with a dense float64 computation",
        versions=", ".join(f"{name} {version}" for name, version in row_versions(row).items()),
        packages=", ".join(name for name in row.distributions if name != "torch"),
        interpreted=row.interpreted,
        snippet=row.snippet.strip(),
        pages=[list(table) for table in plan.tables],
        num_pages=plan.num_pages,
        dtype=str(dtype).removeprefix("torch."),
        slopes=[round(slope, 9) for slope in lightning_slopes(case.heads.q, 0, 2).tolist()] if case.kind is AttentionKind.LIGHTNING else [],
        verify=case.forward.seq_lens_is_prefix,
        limit=UNINFORMATIVE[dtype] * (10 if case.kind is AttentionKind.LIGHTNING else 1),
    )
    if len(text.splitlines()) > MAX_LINES:
        raise UsageError(
            f"the script for {row.name!r} has {len(text.splitlines())} lines, at most {MAX_LINES} are allowed: shorten its snippet"
        )
    return text
