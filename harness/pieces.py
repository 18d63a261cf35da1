"""Whether the model's own pieces, captured between its attention calls, computed from what really came in."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.harness.draws import HIDDEN
from attnmatrix.harness.measure import relative_rms
from attnmatrix.harness.model import TwoLayerModel, rms_norm
from attnmatrix.harness.runners.recorder import StepRun
from attnmatrix.harness.world import World


def stale_pieces(world: World, run: StepRun) -> list[str]:
    """One line for each result of a piece that does not follow from the step's inputs and the recorded attention outputs.

    The pieces are run again, eagerly, on the live rows. A difference of two units of the dtype is granted, since products
    and sums are each rounded once, plus that of adding up float32 products in another order.
    """
    step, model = world.steps[run.index], TwoLayerModel(world)
    terms = max(HIDDEN, world.case.heads.q * world.case.heads.dim)
    limit = 2 * torch.finfo(world.dtype).eps + terms**0.5 * torch.finfo(torch.float32).eps
    results: list[tuple[str, Tensor, Tensor]] = []
    hidden = step.hidden
    for call in run.calls:
        inputs = model.before(call.layer, hidden, step.inputs[call.layer])
        given = zip("qkv", (call.q, call.k, call.v), inputs, strict=True)
        results += [(f"{name} of layer {call.layer}", actual, right) for name, actual, right in given]
        hidden = model.after(call.layer, hidden, call.out)
    results.append(("the model's output", run.final, rms_norm(hidden)))
    return [
        f"{name} does not follow from what came before it (relative difference {float(error.max()):.3g}): a captured piece is stale"
        for name, error in ((name, _errors(actual, right)) for name, actual, right in results)
        if error.numel() and float(error.max()) > limit
    ]


def _errors(actual: Tensor, right: Tensor) -> Tensor:
    """Row-relative errors of the rows that are finite where they are right; attention that left NaN is judged elsewhere."""
    rows = right.isfinite().all(dim=-1)
    return relative_rms(actual[rows], right[rows])
