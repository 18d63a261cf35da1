"""The buffers that a decode or verify graph is captured on: a batch of fixed size with the same number of tokens per request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnmatrix.cases.options import Tree
from attnmatrix.harness.batch import Batch, DraftTree
from attnmatrix.harness.draft_tree import draft_tree
from attnmatrix.harness.runners.static_tokens import StaticTokens, scratch_locations
from attnmatrix.harness.world import World


@dataclass
class HostRow:
    """What is known of one request on the host."""

    prefix: int
    tree: Tree


class StaticBatch:
    """Device buffers for ``rows`` requests, and what the host knows of each row.

    A padded row is one token (verify: one dummy draft tree) without prefix in request row 0, as engines fill it, or keeps
    what an earlier batch left. Either way its ``out_loc`` is scratch and its state slot (and the slot of its snapshot) -1.
    """

    def __init__(self, world: World, rows: int) -> None:
        case, device = world.case, world.device
        self.world, self.rows, self.width = world, rows, world.context.tokens_per_request
        tokens = rows * self.width
        self.padding = HostRow(0, case.tree(0))
        self._padding_depths = torch.tensor(case.depths(0), device=device)
        self._padding_ancestors = draft_tree(case, device).ancestors[: self.width]
        self.host = [self.padding] * rows
        self.tokens = StaticTokens(world, tokens)
        self.seq_lens = torch.empty(rows, dtype=torch.int32, device=device)
        self.req_pool_indices = torch.empty(rows, dtype=torch.int64, device=device)
        self.positions = torch.empty(tokens, dtype=torch.int64, device=device)
        self.out_loc = torch.empty(tokens, dtype=torch.int64, device=device)
        self.cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device) * self.width
        self.state_indices = torch.empty(rows, dtype=torch.int32, device=device) if world.context.states is not None else None
        tracks = bool(case.track_lens)
        self.track_lens = torch.empty(rows, dtype=torch.int32, device=device) if tracks else None
        self.track_state_indices = torch.empty(rows, dtype=torch.int32, device=device) if tracks else None
        self.ancestors = torch.empty(tokens, self.width, dtype=torch.bool, device=device) if case.forward.seq_lens_is_prefix else None
        self._pad(0)

    def capture(self) -> Batch:
        """A batch of padding only, all rows taken for requests."""
        return self._batch(self.rows)

    def load(self, index: int, fill: str) -> Batch:
        """Put step ``index`` into the first rows and pad the rest; ``fill`` is ``production`` or ``stale``."""
        world, step = self.world, self.world.steps[index]
        batch, live = world.batch(index), step.case.num_tokens
        clear = fill == "production"
        if clear:
            self._pad(batch.size)
        self.tokens.fill(step, clear and world.conventions.unreferenced_may_hold_nan)
        self.out_loc[live:] = scratch_locations(world, len(self.out_loc) - live)
        pairs = [(self.seq_lens, batch.seq_lens), (self.req_pool_indices, batch.req_pool_indices)]
        pairs += [(self.positions, batch.positions), (self.out_loc, batch.out_loc)]
        if self.state_indices is not None and batch.state_indices is not None:
            self.state_indices[batch.size :] = -1
            pairs.append((self.state_indices, batch.state_indices))
        if self.track_lens is not None and self.track_state_indices is not None:
            self.track_state_indices[batch.size :] = -1
            assert batch.track_lens is not None
            assert batch.track_state_indices is not None
            pairs += [(self.track_lens, batch.track_lens), (self.track_state_indices, batch.track_state_indices)]
        if self.ancestors is not None and batch.drafts is not None:
            pairs.append((self.ancestors, batch.drafts.ancestors))
        for own, given in pairs:
            own[: len(given)].copy_(given)
        trees = batch.drafts.trees if batch.drafts is not None else (self.padding.tree,) * batch.size
        self.host[: batch.size] = [HostRow(prefix, tree) for prefix, tree in zip(batch.prefix_lens, trees, strict=True)]
        return self._batch(batch.size)

    def _pad(self, start: int) -> None:
        """Make padding of the rows from ``start`` on."""
        world, width = self.world, self.width
        token = start * width
        self.host[start:] = [self.padding] * (self.rows - start)
        self.seq_lens[start:] = 0 if world.case.forward.seq_lens_is_prefix else width
        self.req_pool_indices[start:] = 0
        self.positions[token:] = self._padding_depths.repeat(self.rows - start)
        self.out_loc[token:] = scratch_locations(world, len(self.out_loc) - token)
        if self.state_indices is not None:
            self.state_indices[start:] = -1
        if self.track_lens is not None and self.track_state_indices is not None:
            self.track_lens[start:] = 0
            self.track_state_indices[start:] = -1
        if self.ancestors is not None:
            self.ancestors[token:] = self._padding_ancestors.repeat(self.rows - start, 1)

    def _batch(self, size: int) -> Batch:
        drafts = None
        if self.ancestors is not None:
            drafts = DraftTree(tuple(row.tree for row in self.host), self.ancestors, self.world.case.draft_kind)
        prefixes, new = tuple(row.prefix for row in self.host), (self.width,) * self.rows
        return Batch(
            forward_mode=self.world.case.forward,
            size=size,
            padded_reqs=self.rows,
            prefix_lens=prefixes,
            new_lens=new,
            kv_lens=tuple(prefix + self.width for prefix in prefixes),
            seq_lens=self.seq_lens,
            req_pool_indices=self.req_pool_indices,
            out_loc=self.out_loc,
            positions=self.positions,
            cu_seqlens_q=self.cu_seqlens_q,
            state_indices=self.state_indices,
            drafts=drafts,
            track_lens=self.track_lens,
            track_state_indices=self.track_state_indices,
        )

    @property
    def fields(self) -> dict[str, Tensor]:
        """The buffers that a backend is given and must leave alone, by the name of the Batch field."""
        named = {
            "seq_lens": self.seq_lens,
            "req_pool_indices": self.req_pool_indices,
            "out_loc": self.out_loc,
            "positions": self.positions,
            "cu_seqlens_q": self.cu_seqlens_q,
            "state_indices": self.state_indices,
            "track_lens": self.track_lens,
            "track_state_indices": self.track_state_indices,
            "drafts.ancestors": self.ancestors,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}
