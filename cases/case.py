"""A Case: one frozen, hashable description of an attention batch, with an id that can be typed back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property

from attnmatrix.cases.options import KV_SCALES, Tree, format_trees
from attnmatrix.cases.validity import problem_of


class AttentionKind(str, Enum):
    """The semantics a backend implements; one table of the matrix each."""

    SOFTMAX = "softmax"
    LIGHTNING = "lightning"


class ForwardMode(str, Enum):
    """What a batch asks of the backend, in serving-engine terms."""

    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    IDLE = "idle"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"
    DRAFT_EXTEND_V2 = "draft_extend_v2"

    @property
    def seq_lens_is_prefix(self) -> bool:
        """Whether ``Batch.seq_lens`` counts the cached prefix only (else prefix plus new tokens)."""
        return self in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)


class Placement(str, Enum):
    """How logical pages are laid over the physical pool."""

    CONTIGUOUS = "contiguous"
    SHUFFLED = "shuffled"
    INTERLEAVED = "interleaved"
    SCATTERED = "scattered"
    SHARED = "shared"


class Scratch(str, Enum):
    """Where the pool keeps the page that padded tokens write to."""

    LAST = "last"
    FIRST = "first"
    NONE = "none"


@dataclass(frozen=True)
class Heads:
    """Query heads, key/value heads and head dim; ``q`` is a multiple of ``kv``."""

    q: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return f"h{self.q}x{self.kv}x{self.dim}"

    @property
    def group(self) -> int:
        """Query heads per key/value head (the GQA ratio)."""
        return self.q // self.kv


@dataclass(frozen=True)
class Case:
    """One batch to try.

    ``prefix_lens[i]`` tokens of request i are cached already and ``new_lens[i]`` are computed now; the new ones
    are the last positions. ``window`` counts visible keys, the query's own included; ``None`` is unlimited.
    ``trees`` holds one parent tuple per request (or one for all) for target_verify; empty means a chain.
    ``kv_dtype`` is what the cache holds (``None``: ``dtype``), scaled by :meth:`kv_scales`. ``gain`` multiplies the queries, ``state_scale`` the random initial recurrent state, which the pool holds in ``state_dtype`` (``None``:
    float32). ``track_lens[i]`` new tokens of request i are to be snapshot into a second state slot (0: none), ``story`` says what the
    requests do next (see :mod:`attnmatrix.cases.story`), ``shard`` ``(rank, ranks)`` which slice of a model's heads these are.
    ``spare_pages`` of no request are added to the pool, so that pages lie further apart. Every score is ``score_drop`` lower than the queries and
    keys would give by themselves, which changes no softmax.
    Raises ValueError for a description that no engine could produce.
    """

    forward: ForwardMode
    page_size: int
    prefix_lens: tuple[int, ...]
    new_lens: tuple[int, ...]
    heads: Heads
    dtype: str = "bf16"
    placement: Placement = Placement.SHUFFLED
    kind: AttentionKind = AttentionKind.SOFTMAX
    scratch: Scratch = Scratch.LAST
    window: int | None = None
    window_layers: str = "all"
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    trees: tuple[Tree, ...] = ()
    draft_kind: str | None = None
    kv_dtype: str | None = None
    gain: float = 1.0
    state_scale: float = 0.05
    strided: bool = False
    seed: int = 0
    state_dtype: str | None = None
    track_lens: tuple[int, ...] = ()
    story: str = ""
    shard: tuple[int, int] = (0, 1)
    spare_pages: int = 0
    score_drop: float = 0.0
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        problem = problem_of(self)
        if problem:
            raise ValueError(f"case {self.id}: {problem}")

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Total length of each request after this batch."""
        return tuple(p + n for p, n in zip(self.prefix_lens, self.new_lens, strict=True))

    @property
    def batch_size(self) -> int:
        return len(self.new_lens)

    @property
    def num_tokens(self) -> int:
        """New tokens of the whole batch."""
        return sum(self.new_lens)

    @property
    def has_wide_pool(self) -> bool:
        """Whether the offset of some element in a layer's keys does not fit into 32 bits."""
        return self.spare_pages * self.page_size * self.heads.kv * self.heads.dim >= 2**31

    def tree(self, request: int) -> Tree:
        """Parent of each new token of ``request`` (index within the request, -1 for the last prefix token)."""
        if not self.trees:
            return tuple(range(-1, self.new_lens[request] - 1))
        return self.trees[0] if len(self.trees) == 1 else self.trees[request]

    def depths(self, request: int) -> tuple[int, ...]:
        """Steps below the prefix of each new token of ``request``; position = prefix + depth."""
        depths: list[int] = []
        for parent in self.tree(request):
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def layer_window(self, layer: int) -> int | None:
        """The window of one layer; ``window_layers='first'`` leaves all but layer 0 unlimited."""
        return self.window if layer == 0 or self.window_layers == "all" else None

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """What one layer's cached keys and values are multiplied by when they are read; (1, 1) where they are held in the case's dtype."""
        return (1.0, 1.0) if self.kv_dtype is None else KV_SCALES[layer % len(KV_SCALES)]

    @cached_property
    def id(self) -> str:
        """Readable id built from the fields; :func:`attnmatrix.cases.ids.parse_case` is its inverse."""
        parts = [] if self.kind is AttentionKind.SOFTMAX else [self.kind.value]
        parts += [
            self.forward.value,
            f"p{self.page_size}",
            "prefix" + _format_lens(self.prefix_lens),
            "new" + _format_lens(self.new_lens),
            str(self.heads),
            self.dtype,
            self.placement.value,
        ]
        if self.scratch is not Scratch.LAST:
            parts.append("scratch" + self.scratch.value)
        if self.window is not None:
            parts.append(f"w{self.window}")
        if self.window_layers != "all":
            parts.append(f"w{self.window_layers}")
        if self.soft_cap is not None:
            parts.append("cap" + _format_number(self.soft_cap))
        parts += [flag for flag in ("sinks", "alibi", "strided") if getattr(self, flag)]
        if self.trees:
            parts.append("tree" + format_trees(self.trees))
        if self.draft_kind is not None:
            parts.append(self.draft_kind)
        if self.kv_dtype is not None:
            parts.append(f"kv{self.kv_dtype}")
        if self.gain != 1.0:
            parts.append("gain" + _format_number(self.gain))
        if self.state_scale != 0.05:
            parts.append("state" + _format_number(self.state_scale))
        if self.state_dtype is not None:
            parts.append("states" + self.state_dtype)
        if self.track_lens:
            parts.append("track" + _format_lens(self.track_lens))
        if self.spare_pages:
            parts.append(f"spare{self.spare_pages}")
        if self.score_drop:
            parts.append("drop" + _format_number(self.score_drop))
        if self.shard != (0, 1):
            parts.append("shard{}of{}".format(*self.shard))
        if self.story:
            parts.append("then" + self.story)
        if self.seed:
            parts.append(f"s{self.seed}")
        return "-".join(parts)

    @cached_property
    def content_hash(self) -> str:
        """Hash of the fields that differ from their defaults; the name does not count. Equal cases have equal hashes."""
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.compare and getattr(self, f.name) != f.default}
        content["heads"] = str(self.heads)
        for name in {"soft_cap", "gain", "state_scale", "score_drop"} & content.keys():
            content[name] = float(content[name])
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def data_seed(self) -> int:
        """Seed of every random number drawn for this case, from its content."""
        return int(self.content_hash, 16) % 2**63

    def but(self, **changes: object) -> Case:
        """A copy with some fields changed; the name is dropped unless given."""
        return replace(self, **{"name": "", **changes})  # type: ignore[arg-type]


def _format_number(number: float) -> str:
    """The shortest text that reads back as the same float."""
    short = f"{number:g}"
    return short if float(short) == number else repr(float(number))


def _format_lens(lens: tuple[int, ...]) -> str:
    """``(0, 8, 8, 8, 8)`` becomes ``0.8x4``: runs of four and more are counted."""
    out: list[str] = []
    index = 0
    while index < len(lens):
        run = 1
        while index + run < len(lens) and lens[index + run] == lens[index]:
            run += 1
        out += [f"{lens[index]}x{run}"] if run >= 4 else [str(lens[index])] * run
        index += run
    return ".".join(out)
