"""A package that no row wires, as files: one Triton kernel, causal attention over a paged pool, with the metadata that pip would write."""

from __future__ import annotations

from pathlib import Path

KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(q, k, v, out, starts, lens, table, scale, q_t, q_h, k_page, k_slot, k_head, table_r, GROUP: tl.constexpr, PAGE: tl.constexpr,
            DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    request, index, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts + request)
    new = tl.load(starts + request + 1) - begin
    if index < new:
        last = tl.load(lens + request) - new + index
        column = tl.arange(0, WIDE)
        query = tl.load(q + (begin + index) * q_t + head * q_h + column, mask=column < DIM, other=0.0).to(tl.float32)
        top, total = float("-inf"), 0.0
        acc = tl.zeros([WIDE], tl.float32)
        for start in range(0, last + 1, BLOCK):
            position = start + tl.arange(0, BLOCK)
            seen = position <= last
            page = tl.load(table + request * table_r + position // PAGE, mask=seen, other=0).to(tl.int64)
            at = page * k_page + (position % PAGE) * k_slot + (head // GROUP) * k_head
            inside = seen[:, None] & (column < DIM)[None, :]
            keys = tl.load(k + at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
            values = tl.load(v + at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
            score = tl.where(seen, tl.sum(keys * query[None, :], 1) * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 0))
            weight, fade = tl.exp(score - higher), tl.exp(top - higher)
            total = total * fade + tl.sum(weight, 0)
            acc = acc * fade + tl.sum(weight[:, None] * values, 0)
            top = higher
        tl.store(out + ((begin + index) * tl.num_programs(2) + head) * DIM + column, acc / total, mask=column < DIM)


def paged_attention(q, keys, values, *, cu_seqlens_q, cache_seqlens, page_table, max_seqlen_q, softmax_scale):
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    tokens, heads, dim = q.shape
    assert keys.stride() == values.stride() and q.stride(2) == keys.stride(3) == 1
    _kernel[(len(cache_seqlens), max_seqlen_q, heads)](
        q, keys, values, out, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, q.stride(0), q.stride(1), *keys.stride()[:3],
        page_table.stride(0), GROUP=heads // keys.shape[2], PAGE=keys.shape[1], DIM=dim, WIDE=triton.next_power_of_2(dim), BLOCK=64,
    )  # fmt: skip
    return out
"""


def install(site: Path, name: str, kernel: str = KERNEL) -> None:
    """Put the package ``name`` into a folder for PYTHONPATH."""
    files = {f"{name}/__init__.py": kernel, f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"}
    files[f"{name}-1.0.dist-info/RECORD"] = "".join(f"{path},,\n" for path in files)
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
