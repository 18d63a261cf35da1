"""An option that is left out only beside another one, as where the two together take a kernel of their own."""

from __future__ import annotations

from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import beyond_window, plant


class NoWindowUnderSoftCap(SoftmaxSubject):
    def window(self, layer: int, batch: Batch) -> int | None:
        return None if self.context.soft_cap is not None else super().window(layer, batch)


class NoSinksOverQuantisedCache(SoftmaxSubject):
    def sink(self) -> Tensor | None:
        kv = self.context.kv
        return None if kv is not None and kv.quantised else super().sink()


class NoAlibiInWindow(SoftmaxSubject):
    def alibi(self, layer: int) -> Tensor:
        slopes = super().alibi(layer)
        return slopes * 0 if self.context.windows[layer] is not None else slopes


class NoSinksUnderSoftCap(SoftmaxSubject):
    def sink(self) -> Tensor | None:
        return None if self.context.soft_cap is not None else super().sink()


def _capped_window(case: Case) -> bool:
    return case.soft_cap is not None and beyond_window(case)


def _quantised_sinks(case: Case) -> bool:
    return case.sinks and case.kv_dtype is not None


def _biased_window(case: Case) -> bool:
    return case.alibi and case.window is not None and max(case.kv_lens, default=0) > 1


def _capped_sinks(case: Case) -> bool:
    return case.sinks and case.soft_cap is not None


plant(
    "X105", "the window left out under a soft cap", NoWindowUnderSoftCap, _capped_window, kind="window", title="No window under a soft cap"
)
plant("X106", "the sinks left out over a quantised cache", NoSinksOverQuantisedCache, _quantised_sinks, kind="score-mod",
      title="No sinks over a quantised cache")  # fmt: skip
plant("X107", "no ALiBi bias in layers with a window", NoAlibiInWindow, _biased_window, kind="score-mod", title="No ALiBi in a window",
      like=("X59", "X32"))  # fmt: skip
plant(
    "X108", "the sinks left out under a soft cap", NoSinksUnderSoftCap, _capped_sinks, kind="score-mod", title="No sinks under a soft cap"
)
