"""Random cases beyond the suites: for calibration and for hunting false alarms."""

from __future__ import annotations

import random
from collections.abc import Iterator

from attnmatrix.cases.case import AttentionKind, Case, ForwardMode, Heads, Placement, Scratch
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.options import DRAFT_KINDS, Tree

GAINS = (1.0, 1.0, 2.0, 4.0, 8.0, 16.0)


def random_cases(kind: AttentionKind, mode: RunnerMode, count: int, seed: int) -> Iterator[Case]:
    """``count`` valid cases that ``mode`` drives: small batches over all axes of a case, reproducible by ``seed``."""
    rng = random.Random(f"{kind.value} {mode.value} {seed}")
    for number in range(count):
        forward = rng.choice([forward for forward in mode.forward_modes if forward is not ForwardMode.IDLE])
        yield _random_case(rng, kind, forward, uniform=mode is RunnerMode.VERIFY_CG, seed=seed * count + number + 1)


def _random_case(rng: random.Random, kind: AttentionKind, forward: ForwardMode, uniform: bool, seed: int) -> Case:
    softmax = kind is AttentionKind.SOFTMAX
    size = rng.randint(1, 4)
    drafts = rng.randint(1, 6)
    prefix = [rng.choice((0, rng.randint(1, 20), rng.randint(1, 80), rng.randint(1, 300))) for _ in range(size)]
    new = [rng.choice((1, rng.randint(1, 8), rng.randint(1, 40))) for _ in range(size)]
    if forward in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        prefix = [max(1, length) for length in prefix]
        new = [1] * size if forward is ForwardMode.DECODE else [drafts if uniform else rng.randint(1, 6) for _ in range(size)]
    options: dict[str, object] = {}
    if forward is ForwardMode.TARGET_VERIFY:
        options["draft_kind"] = rng.choice(DRAFT_KINDS)
        if rng.random() < 0.4:
            options.update(draft_kind="eagle", trees=tuple(_random_tree(rng, length) for length in new))
    if softmax:
        if rng.random() < 0.25:
            options.update(window=rng.randint(1, 40), window_layers=rng.choice(("all", "first")))
        options.update(rng.choice(({}, {}, {}, {"soft_cap": float(rng.choice((5, 20, 50)))}, {"sinks": True}, {"alibi": True})))
    else:
        options["state_scale"] = rng.choice((0.05, 1.0))
    heads = rng.choice((1, 2, 4)), rng.choice((1, 2, 3, 4, 7))
    return Case(
        forward=forward,
        page_size=rng.choice((1, 2, 16, 16, 32, 64)),
        prefix_lens=tuple(prefix),
        new_lens=tuple(new),
        heads=Heads(heads[0] * heads[1], heads[0], rng.choice((64, 80, 96, 128))) if softmax else _square(rng.choice((1, 2, 3, 4))),
        dtype=rng.choice(("bf16", "fp16", "fp32")),
        placement=rng.choice((Placement.SHUFFLED, Placement.SHUFFLED, Placement.INTERLEAVED, Placement.SCATTERED)),
        kind=kind,
        scratch=rng.choice((Scratch.FIRST, Scratch.LAST)),
        gain=rng.choice(GAINS),
        strided=rng.random() < 0.2,
        seed=seed,
        **options,  # type: ignore[arg-type]
    )


def _random_tree(rng: random.Random, nodes: int) -> Tree:
    return tuple(rng.randint(-1, node - 1) for node in range(nodes))


def _square(heads: int) -> Heads:
    return Heads(heads, heads, 128)
