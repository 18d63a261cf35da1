"""The layouts tried on every backend: generators of cases, not copies of them."""

from __future__ import annotations

from collections.abc import Iterable

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads, Scratch
from attnmatrix.cases.placement import with_placements

SOFTMAX_HEADS = Heads(4, 2, 128)
LIGHTNING_HEADS = Heads(2, 2, 128)
DENSE_GEOMETRIES = (Heads(28, 4, 128), Heads(40, 8, 128), Heads(8, 2, 256))
"""Head layouts of released models: 28/4 (Qwen2-7B), 40/8 (Qwen3-14B), dim 256 (Gemma)."""


def default_heads(kind: AttentionKind) -> Heads:
    return SOFTMAX_HEADS if kind is AttentionKind.SOFTMAX else LIGHTNING_HEADS


def other_shape(kind: AttentionKind) -> dict[str, object]:
    """A dtype and a head dim beside the default ones."""
    return {"dtype": "fp16", "heads": Heads(8, 2, 64) if kind is AttentionKind.SOFTMAX else Heads(2, 2, 256)}


def extend(page: int, prefix: Iterable[int], new: Iterable[int], kind: AttentionKind, **options: object) -> Case:
    """An extend batch with the kind's default heads, shuffled pages and bf16 unless said otherwise."""
    values: dict[str, object] = {"heads": default_heads(kind), "kind": kind, "forward": ForwardMode.EXTEND, **options}
    return Case(page_size=page, prefix_lens=tuple(prefix), new_lens=tuple(new), **values)  # type: ignore[arg-type]


def decode(page: int, prefix: Iterable[int], kind: AttentionKind, **options: object) -> Case:
    """A decode batch: one new token per request."""
    prefix = tuple(prefix)
    return extend(page, prefix, (1,) * len(prefix), kind, forward=ForwardMode.DECODE, **options)


def seed_layouts(kind: AttentionKind) -> tuple[Case, ...]:
    """The ten layouts that every backend of every kind must meet."""
    return (
        extend(1, (2, 4), (3, 1), kind, name="page_size_1"),
        extend(16, (0,), (16,), kind, name="zero_prefix_exact_page"),
        extend(16, (0, 0, 0), page_boundary_triplet(16), kind, name="zero_prefix_input_page_edges"),
        extend(16, (16,), (2,), kind, name="prefix_exact_page"),
        extend(16, (8,), (8,), kind, name="total_exact_page"),
        extend(16, (15,), (2,), kind, name="cross_page_boundary"),
        extend(16, (0, 8, 16), (15, 8, 1), kind, name="ragged_page_boundary"),
        extend(32, (31,), (2,), kind, name="page32_cross_boundary"),
        decode(16, (14, 15, 16), kind, name="decode_page_boundary"),
        decode(16, (7,), kind, name="decode_bsz1_nonzero_prefix"),
    )


def page_boundary_triplet(page: int) -> tuple[int, int, int]:
    """Lengths one below, at and one above a page edge."""
    return (page - 1, page, page + 1)


def page_size_sweep(kind: AttentionKind, pages: Iterable[int] = (1, 16, 32, 64, 128, 256)) -> tuple[Case, ...]:
    """Per page size an extend and a decode batch whose lengths end around a page edge."""
    cases: list[Case] = []
    for page in pages:
        edges = page_boundary_triplet(max(page, 2))
        scratch = Scratch.FIRST if page in (1, 32, 128) else Scratch.LAST
        cases.append(extend(page, edges, (1, 2, page + 3), kind, scratch=scratch, name=f"page{page}_extend"))
        cases.append(decode(page, (*edges, 2 * page), kind, scratch=scratch, name=f"page{page}_decode"))
    return tuple(cases)


def mixed_batches(kind: AttentionKind) -> tuple[Case, ...]:
    """Prefill from scratch, prefix hit and decode in one batch; single-token extends; zero-length rows; idle."""
    mixed = {"forward": ForwardMode.MIXED}
    return (
        extend(16, (0, 20, 33), (18, 7, 1), kind, name="mixed_scratch_hit_decode", **mixed),
        extend(1, (9, 0, 5), (1, 6, 3), kind, scratch=Scratch.FIRST, name="mixed_decode_first_page1", **mixed),
        extend(16, (40, 12, 0), (1, 1, 1), kind, name="mixed_all_single_token", **mixed),
        extend(16, (0,), (1,), kind, name="single_token_no_prefix"),
        extend(16, (0, 0, 0), (1, 1, 1), kind, name="single_tokens_no_prefix"),
        extend(16, (17,), (1,), kind, name="single_token_with_prefix"),
        extend(16, (0, 17, 0), (1, 1, 5), kind, name="single_token_beside_longer"),
        extend(16, (5, 9), (2, 0), kind, name="zero_length_row_last"),
        extend(16, (0, 12, 30), (0, 4, 9), kind, name="zero_length_row_first"),
        extend(16, (0, 0, 3), (0, 0, 2), kind, scratch=Scratch.FIRST, name="zero_length_rows_two_of_three"),
        extend(16, (), (), kind, forward=ForwardMode.IDLE, name="idle"),
    )


def uniform_extends(kind: AttentionKind) -> tuple[Case, ...]:
    """Borders of the fast paths on uniform lengths (no prefix hit: cu_seqlens_q == cu_seqlens_k; decode: arange)."""
    return (
        extend(16, (0, 0), (21, 21), kind, name="uniform_no_prefix"),
        extend(16, (7, 7), (3, 3), kind, name="uniform_prefix"),
        extend(16, (0, 1), (21, 20), kind, name="one_key_of_prefix"),
        extend(16, (9, 9, 9), (1, 1, 2), kind, name="almost_decode"),
    )


def long_series(kind: AttentionKind) -> tuple[Case, ...]:
    """Many batches on one backend: what it counts, keeps or runs out of shows late."""
    heads = Heads(2, 1, 64) if kind is AttentionKind.SOFTMAX else Heads(1, 1, 128)
    return (
        extend(16, (5, 0), (3, 2), kind, heads=heads, story="o15", name="series_extend"),
        decode(16, (15, 4), kind, heads=heads, story="o15", name="series_decode"),
    )


def conversations(kind: AttentionKind) -> tuple[Case, ...]:
    """Prompts that later steps go on with: ends before, at and behind a page edge, pages of 1 to 256, a prefix hit, a window, another dtype
    and head dim."""
    cases = [
        extend(16, (0, 0, 0), (15, 16, 30), kind, name="handoff_prompts"),
        extend(1, (0, 0), (5, 9), kind, scratch=Scratch.FIRST, name="handoff_page1"),
        extend(256, (0, 0), (255, 40), kind, name="handoff_page256"),
        extend(16, (0, 20), (18, 7), kind, name="handoff_prefix"),
        extend(64, (0, 0), (63, 70), kind, name="handoff_page64_fp16", **other_shape(kind)),
        extend(256, (0, 0), (257, 9), kind, name="handoff_page256_fp16", **other_shape(kind)),
    ]
    if kind is AttentionKind.SOFTMAX:
        cases.append(extend(16, (0, 0), (9, 33), kind, window=16, name="handoff_window"))
    return tuple(cases)


def long_contexts(kind: AttentionKind, lengths: Iterable[int] = (1000, 4000)) -> tuple[Case, ...]:
    """Long cached prefixes with a short new part."""
    cases: list[Case] = []
    for length in lengths:
        cases.append(extend(64, (length, 130), (5, 9), kind, name=f"context{length}_extend"))
        cases.append(decode(16, (length + 7, 40), kind, name=f"context{length}_decode"))
    if kind is AttentionKind.SOFTMAX:
        cases.append(decode(16, (1500,), kind, heads=Heads(14, 2, 64), name="context1500_group7_decode"))
    return tuple(cases)


def large_shapes() -> tuple[Case, ...]:
    """Sizes at which kernels take another way: pages larger than a key tile and more than 4096 keys, many splits, several query tiles,
    more requests than a warp has groups."""
    softmax, small = AttentionKind.SOFTMAX, Heads(2, 1, 64)
    return (
        extend(256, (5900, 300), (3, 2), softmax, heads=Heads(4, 2, 64), name="large_pages_extend"),
        decode(256, (6000, 256), softmax, heads=Heads(4, 2, 64), name="large_pages_decode"),
        decode(64, (32000,), softmax, heads=small, name="context32000_decode"),
        extend(64, (32000,), (5,), softmax, heads=small, name="context32000_extend"),
        extend(16, (0, 40), (530, 7), softmax, heads=small, name="long_prefill"),
        extend(16, range(0, 36, 3), (1, 2, 3) * 4, softmax, name="many_requests_extend"),
        decode(16, range(3, 36, 2), softmax, name="many_requests_decode"),
    )


def huge_pools() -> tuple[Case, ...]:
    """Pools of more than 2**31 elements in each buffer of keys and of values (6.5 GB in bf16), with live pages at both ends: a slot's offset in
    elements does not fit into int32."""
    softmax, heads = AttentionKind.SOFTMAX, Heads(16, 8, 128)
    return (
        extend(16, (40, 0, 75), (5, 20, 1), softmax, heads=heads, spare_pages=3 * 2**16, name="huge_pool_extend"),
        decode(256, (300, 40, 511), softmax, heads=heads, spare_pages=3 * 2**12, name="huge_pool_decode"),
    )


def longest_contexts() -> tuple[Case, ...]:
    """32,768 cached tokens and a short new part: positions past what 15 bits hold."""
    softmax = AttentionKind.SOFTMAX
    return (
        extend(64, (32768, 20), (5, 3), softmax, name="context32768_extend"),
        decode(16, (32768, 40), softmax, name="context32768_decode"),
    )


def page256_variants() -> tuple[Case, ...]:
    """What pages of 16 meet, in pages of 256, which some packages ask for: a window, soft cap, ALiBi, another dtype, head dim and group."""
    softmax = AttentionKind.SOFTMAX
    shape = other_shape(softmax)
    return (
        extend(256, (255, 300), (3, 1), softmax, window=64, name="page256_window"),
        extend(256, (0, 257), (2, 3), softmax, soft_cap=5.0, gain=4.0, name="page256_soft_cap"),
        decode(256, (255, 256), softmax, alibi=True, name="page256_alibi_decode"),
        extend(256, (255, 0), (2, 30), softmax, name="page256_fp16_extend", **shape),
        decode(256, (255, 511, 3), softmax, name="page256_fp16_decode", **shape),
    )


def window_edges(window: int, page: int = 16) -> tuple[Case, ...]:
    """Total lengths w-1, w, w+1 and w+2 for a window of w keys, in extend and decode; one with an unlimited layer 1, one in large pages."""
    totals = (window - 1, window, window + 1, window + 2)
    softmax = AttentionKind.SOFTMAX
    prefixes = tuple(total - 1 for total in totals)
    return (
        decode(page, (*prefixes, 3 * window), softmax, window=window, name=f"window{window}_decode"),
        extend(page, (*prefixes, 3 * window), (1, 1, 1, 1, 6), softmax, window=window, name=f"window{window}_extend"),
        extend(page, (0, 2 * window), (window + 3, 5), softmax, window=window, window_layers="first", name=f"window{window}_layer0"),
        extend(128, (window - 3, 130), (5, 2), softmax, window=window, name=f"window{window}_page128"),
    )


def score_options() -> tuple[Case, ...]:
    """Soft cap, sinks, ALiBi (far too), strided inputs, scores past float32's range of exp, a real geometry with sinks and window 128."""
    softmax = AttentionKind.SOFTMAX
    shape = {"page": 16, "prefix": (0, 20, 33), "new": (18, 7, 1), "kind": softmax}
    decodes = {"page": 16, "prefix": (5, 17, 64), "kind": softmax}
    cases: list[Case] = []
    for name, options in (
        ("soft_cap", {"soft_cap": 5.0, "gain": 4.0}),
        ("sinks", {"sinks": True}),
        ("alibi", {"alibi": True}),
        ("strided", {"strided": True}),
    ):
        cases.append(extend(**shape, name=f"{name}_extend", **options))  # type: ignore[arg-type]
        cases.append(decode(**decodes, name=f"{name}_decode", **options))  # type: ignore[arg-type]
    cases.append(decode(16, (40, 600), softmax, heads=Heads(4, 2, 64), alibi=True, name="alibi_far_decode"))
    cases.append(extend(16, (8, 16), (8, 1), softmax, gain=16.0, name="loud_extend"))
    cases.append(decode(16, (14, 40), softmax, gain=16.0, name="loud_decode"))
    oss = {"heads": Heads(64, 8, 64), "sinks": True, "window": 128, "window_layers": "first"}
    cases.append(extend(16, (0, 150), (140, 3), softmax, name="gpt_oss_extend", **oss))
    cases.append(decode(16, (126, 127, 128, 300), softmax, name="gpt_oss_decode", **oss))
    return tuple(cases)


def head_geometries(kind: AttentionKind) -> tuple[Case, ...]:
    """GQA ratios 1, 2, 3, 4, 7, 8 and MQA, head dims 64 to 256, geometries of released models."""
    if kind is AttentionKind.LIGHTNING:
        heads: tuple[Heads, ...] = (*(Heads(n, n, 128) for n in (1, 3, 8, 12)), Heads(4, 4, 64), Heads(4, 4, 96))
    else:
        ratios = (Heads(2 * ratio, 2, 64) for ratio in (1, 2, 3, 4, 7, 8))
        heads = (*ratios, Heads(8, 1, 128), Heads(4, 2, 80), Heads(4, 2, 96), *DENSE_GEOMETRIES)
    cases: list[Case] = []
    for shape in heads:
        cases.append(extend(16, (0, 20), (18, 3), kind, heads=shape, name=f"{shape}_extend"))
        cases.append(decode(16, (5, 32), kind, heads=shape, name=f"{shape}_decode"))
    return tuple(cases)


def precision_variants(kind: AttentionKind) -> tuple[Case, ...]:
    """Each dtype on one ragged extend and one decode, with small and large queries."""
    cases: list[Case] = []
    for dtype in ("bf16", "fp16", "fp32"):
        for gain in (1.0, 4.0):
            options = {"dtype": dtype, "gain": gain}
            cases.append(extend(16, (0, 8, 16), (15, 8, 1), kind, name=f"{dtype}_gain{gain:g}_extend", **options))
            cases.append(decode(16, (14, 15, 16), kind, name=f"{dtype}_gain{gain:g}_decode", **options))
    return tuple(cases)


def state_variants() -> tuple[Case, ...]:
    """Recurrent states of unit scale, where the prefix dominates the output; decays that add up to more than exp can hold; views
    of one fused buffer."""
    lightning = AttentionKind.LIGHTNING
    return (
        extend(16, (0, 40, 7), (9, 3, 70), lightning, state_scale=1.0, name="unit_state_extend"),
        decode(16, (40, 7), lightning, state_scale=1.0, name="unit_state_decode"),
        extend(16, (0,), (180,), lightning, heads=Heads(8, 8, 64), name="steep_decay_extend"),
        extend(16, (0, 20, 33), (18, 7, 1), lightning, strided=True, name="strided_extend"),
        decode(16, (5, 17, 64), lightning, strided=True, name="strided_decode"),
        decode(256, (255, 3), lightning, name="page256_decode", **other_shape(lightning)),
        decode(1, (9, 4), lightning, name="page1_decode"),
    )


def placement_variants(kind: AttentionKind) -> tuple[Case, ...]:
    """The seed layouts under every placement that differs, and one batch with a common prefix."""
    common = extend(16, (48, 48, 40), (5, 17, 1), kind, name="common_prefix")
    return tuple(variant for case in (*seed_layouts(kind), common) for variant in with_placements(case))
