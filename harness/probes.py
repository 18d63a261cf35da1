"""The inputs that a case is run with: queries, keys and values, and what lies in slots that nobody may read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from attnmatrix.cases.case import Case


class Poison(str, Enum):
    """What lies in every slot outside the live set."""

    BIG_VALUES = "big_values"  # K = 0 scores like an average key, V = 1e4 shows at once
    RANDOM = "random"  # large random K and V
    ZEROS = "zeros"  # what a fresh pool holds; hides most reads of it
    NAN_UNREFERENCED = "nan_unreferenced"  # NaN in pages (state slots) of no request, no table entry points there
    NAN_TAIL = "nan_tail"  # NaN behind each request's last token in its last page
    NAN_WINDOW = "nan_window"  # NaN in the pages of a request that its window has left behind
    NAN_PADDING = "nan_padding"  # NaN in the pages that table entries past a request's last page point to


@dataclass(frozen=True)
class Probe:
    """Inputs of one kind under one fill of the dead slots. Probes that differ in ``poison`` alone have equal live inputs; those of other
    ``inputs`` share none, so that what a row keeps of one world is wrong in the next.

    ``recycled``: what requests at the end take over from those before them (see ``cases.schedule``).
    """

    name: str
    inputs: str = "peaked"
    poison: Poison = Poison.BIG_VALUES
    recycled: str = ""

    @property
    def salt(self) -> int:
        """What a case's seed is combined with."""
        return 0 if self.inputs == "peaked" else 0x9E37


PLAIN = Probe("plain")
"""Peaked inputs and no request that takes over anything: for runs whose tables do not follow, such as those under a control."""
PEAKED = Probe("peaked", recycled="recycled_rows")
POISON = Probe("poison", poison=Poison.RANDOM, recycled="recycled_rows")
NEEDLE = Probe("needle", inputs="needle", recycled="recycled_pages")
PROBES = (PEAKED, POISON, NEEDLE)
"""Every case is run under each of these; peaked and poison must agree to the bit for deterministic rows."""

DRAWN = 2**26  # elements
NEEDLE_SCORE = 24.0  # score of an aligned key: e**24 outweighs any context tried


def fill_keys(poison: Poison, tensor: Tensor, generator: torch.Generator) -> None:
    """Overwrite a key buffer (any shape) with poison."""
    if poison is Poison.RANDOM:
        _fill_random(tensor, generator, 8.0)
    else:
        tensor.zero_()


def fill_values(poison: Poison, tensor: Tensor, generator: torch.Generator) -> None:
    """Overwrite a value buffer (any shape) with poison."""
    if poison is Poison.RANDOM:
        _fill_random(tensor, generator, 100.0)
    elif poison is Poison.ZEROS:
        tensor.zero_()
    else:
        tensor.fill_(min(1e4, torch.finfo(tensor.dtype).max / 4))


def fill_states(poison: Poison, tensor: Tensor, generator: torch.Generator) -> None:
    """Overwrite a state buffer with what another request left behind: random, of unit scale or 100 times that; or zeros."""
    if poison is Poison.ZEROS:
        tensor.zero_()
        return
    _fill_random(tensor, generator, 100.0 if poison is Poison.RANDOM else 1.0)


def _fill_random(tensor: Tensor, generator: torch.Generator, scale: float) -> None:
    """A buffer too large to be drawn on the CPU repeats what its first ``DRAWN`` elements hold."""
    rows = len(tensor) if tensor.numel() <= DRAWN else max(1, DRAWN // tensor[0].numel())
    noise = torch.randn(rows, *tensor.shape[1:], generator=generator) * scale
    limit = torch.finfo(tensor.dtype).max / 4
    noise = noise.clamp(-limit, limit).to(tensor.dtype).to(tensor.device)
    for part in tensor.split(max(1, rows)):
        part.copy_(noise[: len(part)])


def peaked(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random normals whose rows differ in size by up to 4, so that scores spread: float32 ``shape`` on the CPU."""
    rows = torch.rand(*shape[:-1], 1, generator=generator)
    return torch.randn(*shape, generator=generator) * (0.5 + 1.5 * rows)


def needle_queries(case: Case, request: int, keys: Tensor) -> Tensor:
    """Queries ``[new, Hq, D]`` each aligned with a single key of ``keys`` ``[kv, Hkv, D]`` (planned, prefix first), float32.

    The targets go round over tokens and heads: the first key, the query's own, both sides of page edges and of the window's edge, and the
    first key it must not see. The aligned key scores about ``NEEDLE_SCORE``; one that is missing, or seen but forbidden, changes
    the whole row.
    """
    heads, new = case.heads, case.new_lens[request]
    rows = [needle_targets(case, request, token) for token in range(new)]
    index = torch.tensor([[row[(token + head) % len(row)] for head in range(heads.q)] for token, row in enumerate(rows)], dtype=torch.int64)
    groups = torch.arange(heads.q) // heads.group
    aligned = keys.float()[index.view(new, heads.q).to(keys.device), groups.to(keys.device)]
    return aligned * (NEEDLE_SCORE * heads.dim**0.5 / aligned.square().sum(dim=-1, keepdim=True).clamp(min=1e-6))


def needle_targets(case: Case, request: int, token: int) -> list[int]:
    """Key indices that tell: for one new token, in a fixed order, duplicates kept out."""
    prefix, kv = case.prefix_lens[request], case.kv_lens[request]
    own = prefix + token
    edge = own // case.page_size * case.page_size
    targets = [own, 0, own + 1, edge, edge - 1, prefix - 1, prefix, kv - 1]
    if case.window is not None:
        targets += [own - case.window, own - case.window + 1]
    parents = case.tree(request)
    if case.trees:
        targets += [prefix + node for node in range(len(parents)) if parents[node] == parents[token]]
    return [target for target in dict.fromkeys(targets) if 0 <= target < kv]


def orthogonal_keys(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Queries and keys ``[T, H, D]`` for recurrences: token t's key is the (permuted) unit vector ``t % D`` times 4, its query the
    one of a token before it in the same request, so that a single token (and a single row of the state) decides each output."""
    dim, heads = case.heads.dim, case.heads.q
    order = torch.randperm(dim, generator=generator)
    basis = torch.eye(dim)[order] * 4.0
    keys, queries = [], []
    for new in case.new_lens:
        index = torch.arange(new)
        back = (index[:, None] - (torch.arange(heads)[None, :] + index[:, None]) % 5).clamp(min=0)
        keys.append(basis[index % dim][:, None].expand(new, heads, dim))
        queries.append(basis[back % dim])
    if not case.num_tokens:
        return torch.zeros(0, heads, dim), torch.zeros(0, heads, dim)
    return torch.cat(queries), torch.cat(keys)
