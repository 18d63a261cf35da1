"""Text for people: why a cell failed, and what a case's layout looks like."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.placement import plan_pool
from attnmatrix.cases.schedule import Schedule, schedule
from attnmatrix.harness.registry import UsageError
from attnmatrix.matrix.record import Record

MAX_ROWS = 24


def failure_message(record: Record, plugins: Sequence[str] = ()) -> str:
    """What went wrong in one cell, where, and the command that shows it again; ``plugins``: the row files that were loaded."""
    loaded = "".join(f"--plugin {shlex.quote(plugin)} " for plugin in plugins)
    name = f" ({record.case_name})" if record.case_name else ""
    lines = [
        f"{record.status}: row {record.backend!r} ({record.kind}), mode {record.mode}, {record.device}",
        f"case {record.case}{name}",
        record.reason,
        *(f"  - {detail}" for detail in record.details if detail != record.reason),
    ]
    if record.diagnosis:
        lines.append(f"diagnosis: {record.diagnosis}")
    if record.where:
        lines.append(f"where: {record.where}")
    lines += [
        f"again:  attnmatrix run {loaded}--backend {record.backend} --mode {record.mode} --case {record.case} --device {record.device_type}",
        f"layout: attnmatrix explain {record.case}",
    ]
    return "\n".join(lines)


def explain_case(case: Case, mode: RunnerMode, probe: str = "peaked") -> str:
    """The case's requests, page tables and, for each new token, the keys it may see (``#`` seen, ``.`` not).

    Tables are those of the pool that ``mode`` builds under a ``probe``, where the case's requests come first; the other batches follow.
    Raises UsageError for an unknown probe.
    """
    from attnmatrix.harness.probes import PROBES

    recycled = {known.name: known.recycled for known in PROBES}
    if probe not in recycled:
        raise UsageError(f"unknown probe {probe!r}; known: {', '.join(recycled)}")
    return "\n".join(_lines(case, mode, probe, schedule(case, mode, recycled[probe])))


def _lines(case: Case, mode: RunnerMode, probe: str, steps: Schedule) -> Iterator[str]:
    plan = plan_pool(steps.owners)
    yield f"case {case.id}{f' ({case.name})' if case.name else ''}"
    yield f"{case.kind.value}, {case.forward.value}, {case.heads.q} query heads on {case.heads.kv} key/value heads of dim {case.heads.dim}, {case.dtype}"
    scratch = "none" if plan.scratch_page is None else str(plan.scratch_page)
    yield f"pool: {plan.num_pages} pages of {plan.page_size}, scratch page {scratch}, placement {case.placement.value}"
    if case.kv_dtype:
        even, odd = ("{} and {}".format(*case.kv_scales(layer)) for layer in (0, 1))
        yield f"keys and values cached in {case.kv_dtype}, their scales {even} in even layers, {odd} in odd ones"
    starts = [sum(case.new_lens[:r]) for r in range(case.batch_size + 1)]
    yield f"cu_seqlens_q = {starts}"
    yield f"cache_seqlens = {list(case.kv_lens)}  (seq_lens of the batch: {list(case.prefix_lens if case.forward.seq_lens_is_prefix else case.kv_lens)})"
    for request, (prefix, new) in enumerate(zip(case.prefix_lens, case.new_lens, strict=True)):
        yield ""
        yield f"request {request}: {prefix} cached, {new} new; pages {list(plan.tables[request])}"
        stored = [plan.slot(request, prefix + index) for index in range(new)]
        yield f"  out_loc = {stored if new <= MAX_ROWS else f'{stored[:8]} ... {stored[-4:]}'}"
        if case.kind is AttentionKind.SOFTMAX:
            yield from _mask(case, request)
        elif case.trees:
            yield f"  parents = {list(case.tree(request))}"
    yield ""
    yield f"mode {mode.value} runs {len(steps.steps)} batches in this pool under the {probe} probe" + (
        f", captured at sizes {list(steps.captures)}:" if steps.captures else ":"
    )
    for number, step in enumerate(steps.steps):
        padded = f", padded to {step.padded} ({step.fill})" if steps.captures else ""
        places = (
            ""
            if not step.recycles
            else ", other requests in the rows of those before"
            + (" and in their pages" if step.follows == "recycled_pages" else ", in pages of their own")
        )
        yield f"  step {number}: prefix {list(step.case.prefix_lens)}, new {list(step.case.new_lens)}{padded}{places}"


def _mask(case: Case, request: int) -> Iterator[str]:
    from attnmatrix.references.visibility import visible_keys

    prefix, new = case.prefix_lens[request], case.new_lens[request]
    if case.forward is ForwardMode.TARGET_VERIFY:
        yield f"  parents = {list(case.tree(request))}"
    for layer in range(2 if case.window_layers == "first" and case.window else 1):
        if case.window is not None:
            yield f"  layer {layer}: window {case.layer_window(layer) or 'unlimited'}"
        mask = visible_keys(case, request, layer)
        for row in range(min(new, MAX_ROWS)):
            seen = mask[row].nonzero().flatten().tolist()
            if prefix + new <= 100:
                cells = "".join("#" if visible else "." for visible in mask[row].tolist())
                yield f"  token {row:3d}  {cells[:prefix]}|{cells[prefix:]}"
            else:
                span = f"{seen[0]}..{seen[-1]}" if seen == list(range(seen[0], seen[-1] + 1)) else f"{seen[0]}..{seen[-1]} with gaps"
                yield f"  token {row:3d}  sees keys {span} ({len(seen)} of {prefix + new})"
        if new > MAX_ROWS:
            yield f"  ... {new - MAX_ROWS} more tokens"
