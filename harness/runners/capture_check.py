"""What warm-up and capture, which run on dummy data, must fulfil."""

from __future__ import annotations

from torch import Tensor

from attnmatrix.harness.world import World


def not_finite(world: World, stage: str, final: Tensor) -> list[str]:
    """A line when the model's output at ``stage`` is not finite.

    Linear kinds are exempt: all their rows have state slot -1, whose output is undefined.
    """
    if world.context.states is not None or bool(final.isfinite().all()):
        return []
    return [f"{stage}: the model's output is not finite"]
