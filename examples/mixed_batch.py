"""A mixed batch by hand: prefill from scratch, prefix hit and decode through the five-method contract.

Requests A (0 cached, 6 new), B (4 cached, 3 new) and C (8 cached, 1 new) over a pool of page size 1 without a scratch page, 16 query heads
on 8 key/value heads of dim 128 in float32. Prints the batch's numbers and the error against per-request dense causal attention.
"""

from __future__ import annotations

import torch

from attnmatrix.cases.case import AttentionKind, ForwardMode, Heads
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.context import Context
from attnmatrix.harness.pools import KVPool
from attnmatrix.harness.registry import find_row
from attnmatrix.references.softmax import softmax_attention

HEADS = Heads(q=16, kv=8, dim=128)
PREFIX, NEW = (0, 4, 8), (6, 3, 1)
SLOTS = ([*range(6)], [*range(40, 44), *range(20, 23)], [*range(50, 59)])
CPU = torch.device("cpu")


def build_context() -> Context:
    """An empty pool of 59 slots, and a table whose row r holds request r's slots."""
    table = torch.zeros(len(SLOTS), 16, dtype=torch.int32)
    for row, slots in enumerate(SLOTS):
        table[row, : len(slots)] = torch.tensor(slots)
    return Context(
        kind=AttentionKind.SOFTMAX,
        device=CPU,
        dtype=torch.float32,
        heads=HEADS,
        scale=HEADS.dim**-0.5,
        num_layers=1,
        page_size=1,
        req_to_token=table,
        forward_mode=ForwardMode.MIXED,
        tokens_per_request=max(NEW),
        max_reqs=len(SLOTS),
        max_seq_len=table.shape[1],
        kv=KVPool(59, 1, HEADS.kv, HEADS.dim, 1, torch.float32, CPU, "NHD"),
        windows=(None,),
    )


def build_batch() -> Batch:
    """The three requests packed one after the other."""
    kv_lens = tuple(p + n for p, n in zip(PREFIX, NEW, strict=True))
    return Batch(
        forward_mode=ForwardMode.MIXED,
        size=3,
        padded_reqs=3,
        prefix_lens=PREFIX,
        new_lens=NEW,
        kv_lens=kv_lens,
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
        req_pool_indices=torch.arange(3),
        out_loc=torch.tensor([slot for slots, prefix in zip(SLOTS, PREFIX, strict=True) for slot in slots[prefix:]]),
        positions=torch.cat([torch.arange(p, p + n) for p, n in zip(PREFIX, NEW, strict=True)]),
        cu_seqlens_q=torch.tensor([0, *NEW]).cumsum(0).int(),
    )


def main() -> float:
    """Run the batch through the ``torch`` row; returns the largest absolute error."""
    torch.manual_seed(0)
    context, batch = build_context(), build_batch()
    assert context.kv is not None
    context.kv.k(0).zero_()
    context.kv.v(0).zero_()
    keys = [torch.randn(n, HEADS.kv, HEADS.dim) for n in batch.kv_lens]
    values = [torch.randn(n, HEADS.kv, HEADS.dim) for n in batch.kv_lens]
    q = torch.randn(batch.num_tokens, HEADS.q, HEADS.dim)
    for slots, prefix, k, v in zip(SLOTS, PREFIX, keys, values, strict=True):
        context.kv.store(0, torch.tensor(slots[:prefix], dtype=torch.int64), k[:prefix], v[:prefix])
    new_k = torch.cat([k[prefix:] for k, prefix in zip(keys, PREFIX, strict=True)])
    new_v = torch.cat([v[prefix:] for v, prefix in zip(values, PREFIX, strict=True)])

    backend = find_row("torch", AttentionKind.SOFTMAX).create(context)
    backend.prepare_metadata(batch)
    out = backend.forward(q, new_k, new_v, 0, batch)

    error = 0.0
    for row, (start, stop) in enumerate(zip(batch.cu_seqlens_q[:-1].tolist(), batch.cu_seqlens_q[1:].tolist(), strict=True)):
        causal = torch.ones(NEW[row], batch.kv_lens[row], dtype=torch.bool).tril(PREFIX[row])
        right = softmax_attention(q[start:stop], keys[row], values[row], causal, context.scale).out
        error = max(error, float((out[start:stop].double() - right).abs().max()))
    prepared = backend.inspect_metadata(batch)
    assert prepared is not None and prepared.page_table is not None and prepared.cache_seqlens is not None
    print("cu_seqlens_q  =", batch.cu_seqlens_q.tolist())
    print("cache_seqlens =", prepared.cache_seqlens.tolist())
    print("out_loc       =", batch.out_loc.tolist())
    print("last indices  =", batch.attn_metadata.get_last_indices(batch.size).tolist())
    print("page table    =", *prepared.page_table.tolist(), sep="\n  ")
    print(f"largest error against per-request dense causal attention: {error:.1e}")
    return error


if __name__ == "__main__":
    main()
