"""What graphs are captured on: token buffers of a fixed length, and the dummy data they hold at capture."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmatrix.harness.draws import HIDDEN, NUM_LAYERS, LayerInputs, StepData
from attnmatrix.harness.world import World


class StaticTokens:
    """``hidden`` ``[tokens, HIDDEN]`` and planned ``inputs`` of every layer; finite random numbers until first filled."""

    def __init__(self, world: World, tokens: int) -> None:
        heads, generator = world.case.heads, torch.Generator().manual_seed(world.case.data_seed ^ tokens)
        self.tokens = tokens

        def buffer(*shape: int) -> Tensor:
            return torch.randn(tokens, *shape, generator=generator).to(world.dtype).to(world.device)

        self.hidden = buffer(HIDDEN)
        self.inputs = tuple(
            LayerInputs(buffer(heads.q, heads.dim), buffer(heads.kv, heads.dim), buffer(heads.kv, heads.dim)) for _ in range(NUM_LAYERS)
        )

    def fill(self, step: StepData, clear: bool) -> None:
        """Copy a step's tokens to the front. Those behind it become NaN with ``clear``, else stay what they were."""
        live = step.case.num_tokens
        pairs = [(self.hidden, step.hidden)]
        for own, given in zip(self.inputs, step.inputs, strict=True):
            pairs += [(own.q, given.q), (own.k, given.k), (own.v, given.v)]
        for own_tensor, given_tensor in pairs:
            own_tensor[:live].copy_(given_tensor)
            if clear:
                own_tensor[live:].fill_(float("nan"))


def scratch_locations(world: World, tokens: int) -> Tensor:
    """int64 ``[tokens]`` slots of the scratch page, over and over. Raises ValueError for a pool that has none."""
    slots = world.scratch_slots
    if not len(slots):
        raise ValueError(f"runner mode {world.mode.value} pads its batches and needs a pool with a scratch page, got scratch=none")
    return slots[torch.arange(tokens, device=world.device) % len(slots)]
