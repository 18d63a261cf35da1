"""Pairs: prefill by one backend, decode by another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnmatrix.cases.case import ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.capabilities import Claim, Claims, KnownFault
from attnmatrix.harness.context import Context
from attnmatrix.harness.registry import Row, UsageError, find_rows

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.cases.case import Case
    from attnmatrix.harness.batch import Batch

DECODE_MODES = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)
"""Forward modes of the decode side; extend, mixed, idle and draft_extend belong to the prefill side."""


class HybridBackend(AttentionBackend):
    """Dispatches each batch by its forward mode; graph hooks go to the decode side."""

    def __init__(self, context: Context, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        super().__init__(context)
        self.prefill, self.decode = prefill, decode

    def side(self, forward_mode: ForwardMode) -> AttentionBackend:
        return self.decode if forward_mode in DECODE_MODES else self.prefill

    def prepare_metadata(self, batch: Batch) -> None:
        self.side(batch.forward_mode).prepare_metadata(batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        return self.side(batch.forward_mode).forward(q, k, v, layer_id, batch)

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        self.decode.init_capture_graph(max_seq_len, batch_sizes)

    def prepare_for_capture(self, batch: Batch) -> None:
        self.decode.prepare_for_capture(batch)

    def prepare_for_replay(self, batch: Batch) -> None:
        self.decode.prepare_for_replay(batch)

    def commit(self, accepted: Tensor, batch: Batch) -> None:
        self.side(batch.forward_mode).commit(accepted, batch)

    def inspect_metadata(self, batch: Batch) -> PreparedMetadata | None:
        return self.side(batch.forward_mode).inspect_metadata(batch)


@dataclass(frozen=True)
class PairCapabilities:
    """Claims of a pair: each cell's claim is that of the side that runs it."""

    prefill: Claims
    decode: Claims

    @property
    def deterministic(self) -> bool:
        return self.prefill.deterministic and self.decode.deterministic

    @property
    def batch_invariant(self) -> bool:
        return self.prefill.batch_invariant and self.decode.batch_invariant

    def claim(self, mode: RunnerMode, case: Case, device: str) -> Claim:
        return self._side(case).claim(mode, case, device)

    def known_fault(self, mode: RunnerMode, case: Case) -> KnownFault | None:
        return self._side(case).known_fault(mode, case)

    def _side(self, case: Case) -> Claims:
        return self.decode if case.forward in DECODE_MODES else self.prefill


def hybrid_rows(name: str) -> tuple[Row, ...]:
    """The rows of ``prefill,decode``, one per shared kind; ``x,x`` is ``x``.

    Raises UsageError for other than two names, unknown names, no shared kind and pools of different layout.
    """
    names = name.split(",")
    if len(names) != 2 or not all(names):
        raise UsageError(f"a hybrid backend is a pair 'prefill,decode', got {name!r}")
    first, second = find_rows(names[0]), find_rows(names[1])
    if names[0] == names[1]:
        return first
    pairs = [(a, b) for a in first for b in second if a.kind is b.kind]
    if not pairs:
        raise UsageError(f"hybrid backend {name!r}: the two share no attention kind")
    return tuple(_pair(name, a, b) for a, b in pairs)


def _pair(name: str, prefill: Row, decode: Row) -> Row:
    if _layouts(prefill) != _layouts(decode):
        raise UsageError(f"hybrid backend {name!r}: {_layouts(prefill)} and {_layouts(decode)} pools cannot be shared")
    return Row(
        name=name,
        kind=prefill.kind,
        create=lambda context: HybridBackend(context, prefill.create(context), decode.create(context)),
        capabilities=PairCapabilities(prefill.capabilities, decode.capabilities),
        conventions=prefill.conventions,
        distributions=tuple(dict.fromkeys((*prefill.distributions, *decode.distributions))),
        devices=tuple(device for device in prefill.devices if device in decode.devices),
        interpreted=prefill.interpreted or decode.interpreted,
        summary=f"prefill by {prefill.name}, decode by {decode.name}",
        source=prefill.source,
        more_sources=(decode.source,),
    )


def _layouts(row: Row) -> tuple[str, str]:
    return row.conventions.kv_layout, row.conventions.state_layout
