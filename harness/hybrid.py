"""Pairs: prefill by one backend, decode by another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnmatrix.cases.case import ForwardMode
from attnmatrix.cases.modes import RunnerMode
from attnmatrix.cases.schedule import schedule
from attnmatrix.harness.backend import AttentionBackend, PreparedMetadata
from attnmatrix.harness.capabilities import Claim, Claims, Conventions, KnownFault, RoundingStep, Supported, claimed_batches
from attnmatrix.harness.context import Context
from attnmatrix.harness.registry import Row, UsageError, find_rows

if TYPE_CHECKING:
    from torch import Tensor

    from attnmatrix.cases.case import Case
    from attnmatrix.harness.batch import Batch

DECODE_MODES = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)
"""Forward modes of the decode side; extend, mixed, idle and draft_extend belong to the prefill side."""


class HybridBackend(AttentionBackend):
    """Dispatches each batch by its forward mode; graph hooks go to the side of the forward mode that graphs are captured for.

    Outputs are per head, whatever a side's convention is.
    """

    def __init__(self, context: Context, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        super().__init__(context)
        self.prefill, self.decode = prefill, decode
        self.captured = self.side(context.forward_mode)

    def side(self, forward_mode: ForwardMode) -> AttentionBackend:
        return self.decode if forward_mode in DECODE_MODES else self.prefill

    def prepare_metadata(self, batch: Batch) -> None:
        self.side(batch.forward_mode).prepare_metadata(batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> Tensor:
        out = self.side(batch.forward_mode).forward(q, k, v, layer_id, batch)
        return out.view(q.shape) if out.shape == (q.shape[0], q.shape[1] * q.shape[2]) else out

    def forward_with_lse(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.side(batch.forward_mode).forward_with_lse(q, k, v, layer_id, batch)

    @property
    def returns_lse(self) -> bool:
        return self.side(self.context.forward_mode).returns_lse

    def init_capture_graph(self, max_seq_len: int, batch_sizes: Sequence[int]) -> None:
        self.captured.init_capture_graph(max_seq_len, batch_sizes)

    def prepare_for_capture(self, batch: Batch) -> None:
        self.captured.prepare_for_capture(batch)

    def prepare_for_replay(self, batch: Batch) -> None:
        self.captured.prepare_for_replay(batch)

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
        """The first limit that one of the cell's batches meets on its own side."""
        claims = [self._side(batch).claim(_own(mode), batch, device) for batch in claimed_batches(mode, case)]
        return next((claim for claim in claims if not isinstance(claim, Supported)), claims[0])

    def known_fault(self, mode: RunnerMode, case: Case) -> KnownFault | None:
        batches = (case, *schedule(case, mode).batches)
        return next((found for batch in batches if (found := self.fault_of(mode, batch)) is not None), None)

    def fault_of(self, mode: RunnerMode, batch: Case) -> KnownFault | None:
        return self._side(batch).fault_of(_own(mode), batch)

    def _side(self, case: Case) -> Claims:
        return self.decode if case.forward in DECODE_MODES else self.prefill


def _own(mode: RunnerMode) -> RunnerMode:
    """The mode in which one side runs its batches: those of a handoff are eager ones."""
    return RunnerMode.EAGER if mode is RunnerMode.HANDOFF else mode


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


def shares_a_pool(prefill: str, decode: str) -> bool:
    """Whether two rows make a pair: a kind of attention in common, and equal pool layouts in every kind in common."""
    pairs = [(a, b) for a in find_rows(prefill) for b in find_rows(decode) if a.kind is b.kind]
    return bool(pairs) and all(_layouts(a) == _layouts(b) for a, b in pairs)


def _pair(name: str, prefill: Row, decode: Row) -> Row:
    if _layouts(prefill) != _layouts(decode):
        raise UsageError(f"hybrid backend {name!r}: {_layouts(prefill)} and {_layouts(decode)} pools cannot be shared")
    return Row(
        name=name,
        kind=prefill.kind,
        create=lambda context: HybridBackend(context, prefill.create(context), decode.create(_counted_as(context, prefill, decode))),
        capabilities=PairCapabilities(prefill.capabilities, decode.capabilities),
        conventions=_conventions(prefill.conventions, decode.conventions),
        distributions=tuple(dict.fromkeys((*prefill.distributions, *decode.distributions))),
        devices=tuple(device for device in prefill.devices if device in decode.devices),
        interpreted=prefill.interpreted or decode.interpreted,
        slow_on_cpu=prefill.slow_on_cpu or decode.slow_on_cpu,
        few_on_cpu=prefill.few_on_cpu or decode.few_on_cpu,
        summary=f"prefill by {prefill.name}, decode by {decode.name}",
        source=prefill.source,
        more_sources=(decode.source, *prefill.more_sources, *decode.more_sources, __file__),
    )


def _layouts(row: Row) -> tuple[str, str]:
    return row.conventions.kv_layout, row.conventions.state_layout


def _counted_as(context: Context, prefill: Row, decode: Row) -> Context:
    """The context with its windows, which are the prefill side's, as the decode side counts them."""
    before = {"inclusive": 0, "exclusive": 1}
    more = before[prefill.conventions.window] - before[decode.conventions.window]
    return replace(context, windows=tuple(None if window is None else window + more for window in context.windows)) if more else context


def _conventions(prefill: Conventions, decode: Conventions) -> Conventions:
    """The prefill side's, with what both sides tolerate and each side's rounding steps on its own batches."""
    steps = [_on_side(step, decode=False) for step in prefill.rounding] + [_on_side(step, decode=True) for step in decode.rounding]
    return replace(
        prefill,
        output="per_head",
        tail_may_hold_nan=prefill.tail_may_hold_nan and decode.tail_may_hold_nan,
        unreferenced_may_hold_nan=prefill.unreferenced_may_hold_nan and decode.unreferenced_may_hold_nan,
        padding_may_hold_nan=prefill.padding_may_hold_nan and decode.padding_may_hold_nan,
        window_may_hold_nan=prefill.window_may_hold_nan and decode.window_may_hold_nan,
        rounding=tuple(steps),
    )


def _on_side(step: RoundingStep, decode: bool) -> RoundingStep:
    applies: Callable[[Case, str], bool] = step.applies
    return replace(step, applies=lambda case, device: (case.forward in DECODE_MODES) is decode and applies(case, device))
