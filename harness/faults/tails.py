"""Dead keys and values that count a little, or whose NaN leaks."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.cases.case import Case
from attnmatrix.harness.batch import Batch
from attnmatrix.harness.faults.softmax_subject import Partial, SoftmaxSubject
from attnmatrix.harness.faults.softmax_where import EAGER, plant, put_off, requests

FAINT = 1e-7
HIDDEN = -1e30  # a score whose weight is exactly zero


class DeadValuesFaint(SoftmaxSubject):
    def attend(self, scores: Tensor, visible: Tensor, values: Tensor, layer: int, batch: Batch) -> Tensor:
        wide = self.expand(values.float())
        index = torch.arange(wide.shape[1], device=wide.device)
        dead = (index >= batch.attn_metadata.cache_seqlens[:, None])[..., None, None]
        mean = wide.masked_fill(~dead, 0.0).sum(dim=1) / dead.sum(dim=1).clamp(min=1)
        return super().attend(scores, visible, values, layer, batch) + FAINT * mean[:, None]


class ValuesNotCleared(SoftmaxSubject):
    """Masked keys have weight zero, their values are multiplied all the same."""

    def partial(self, scores: Tensor, visible: Tensor, values: Tensor) -> Partial:
        part = super().partial(scores, visible, values)
        shown = super().partial(torch.where(visible[:, None], 0.0, HIDDEN), torch.ones_like(visible), values)
        return Partial(part.out + 0.0 * shown.out, part.lse)


class WindowValuesNotCleared(ValuesNotCleared):
    """So for keys before the window only; those behind the length are cleared."""

    def attend(self, scores: Tensor, visible: Tensor, values: Tensor, layer: int, batch: Batch) -> Tensor:
        index = torch.arange(values.shape[1], device=values.device)
        behind = (index >= batch.attn_metadata.cache_seqlens[:, None])[..., None, None]
        return super().attend(scores, visible, values.masked_fill(behind, 0.0), layer, batch)


def _dead_tail(case: Case) -> bool:
    return any((prefix + new) % case.page_size for prefix, new in requests(case))


def _dead_page(case: Case) -> bool:
    """A page that lies wholly before every token's window."""
    return case.window is not None and any(prefix - case.window + 1 >= case.page_size for prefix, _ in requests(case))


put_off("B25", "pending", "waits for the mla kind: only its latent-KV path leaves the tail uncleared")
plant("B27", f"{FAINT:g} times the mean of the dead values added", DeadValuesFaint, _dead_tail)
plant("B29", "values before the window multiplied by a weight of zero instead of cleared", WindowValuesNotCleared,
      _dead_page, EAGER)  # fmt: skip
plant("X42", "values behind the length multiplied by a weight of zero instead of cleared", ValuesNotCleared, _dead_tail,
      kind="page-tail", title="NaN in the unfilled part of the last page")  # fmt: skip
