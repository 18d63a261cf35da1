"""What a batch's requests do next: the text form of a Case's ``story``.

Turns are joined by ``_``, each a letter and numbers, one for each request or one for all (``x5``, ``x5.9``):

- ``x`` extend by so many tokens, ``d`` so many decode steps (``d3``; ``d`` is ``d1``);
- ``v`` verify so many draft tokens, ``a`` after a verify: how many of each request's draft tokens are accepted and committed;
- ``o`` a batch like the case's own, of other requests and lengths (``o15`` fifteen of them); it stands alone or among others;
- ``n`` a new request of so many tokens, without prefix, takes over the state slot; ``r`` another request of so many new tokens resumes
  the snapshot that the case's own batch took (``track_lens``).

``t`` repeats a turn: ``x64t62`` is 62 extends of 64 tokens. A case's own batch comes first: ``a2_d`` after a target_verify case accepts two
of its draft tokens and goes on without drafts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ACTIONS = {"x": "extend", "d": "decode", "v": "verify", "a": "accept", "n": "renew", "r": "resume", "o": "others"}
_TURN = re.compile(r"([xdvanro])(\d+(?:\.\d+)*)?(?:t(\d+))?")


@dataclass(frozen=True)
class Turn:
    """One later batch of the same requests, or an ``accept``. ``counts`` are tokens per request (decode: steps), one number for all."""

    action: str
    counts: tuple[int, ...]

    def of(self, requests: int) -> tuple[int, ...]:
        """One count for each request."""
        return self.counts * requests if len(self.counts) == 1 else self.counts


def parse_story(text: str) -> tuple[Turn, ...]:
    """The turns of a story, repeated ones written out. Raises ValueError for what is no story."""
    turns: list[Turn] = []
    for word in text.split("_") if text else ():
        match = _TURN.fullmatch(word)
        if match is None or (match[2] is None and match[1] not in "do"):
            raise ValueError(f"unknown turn {word!r}; a turn is one of {', '.join(ACTIONS)} and numbers")
        counts = tuple(int(count) for count in (match[2] or "1").split("."))
        if match[1] in "do":
            turns += [Turn(ACTIONS[match[1]], (1,))] * counts[0]
        else:
            turns += [Turn(ACTIONS[match[1]], counts)] * int(match[3] or 1)
    return tuple(turns)


def goes_on(text: str) -> bool:
    """Whether a story has a batch that goes on from another, not only batches of other requests."""
    return any(not word.startswith("o") for word in text.split("_") if text)


def story_problem(
    text: str, requests: int, verifies: bool, tracks: tuple[int, ...], prefix: tuple[int, ...], drafts: tuple[int, ...]
) -> str | None:
    """Why a story cannot be told of a batch of so many requests, None when it can. ``verifies``: the batch is a target_verify one of
    ``drafts`` tokens."""
    try:
        turns = parse_story(text)
    except ValueError as error:
        return str(error)
    if not requests or 0 in drafts:
        return "a story needs requests, each with a new token"
    others = [turn.action == "others" for turn in turns]
    if any(others):
        return None if all(others) else "batches of other requests (o) stand alone in a story"
    before, last = ("verify" if verifies else "extend"), drafts
    for turn in turns:
        if len(turn.counts) not in (1, requests):
            return f"{len(turn.counts)} counts for {requests} requests in a turn to {turn.action}"
        counts = turn.of(requests)
        if (turn.action == "accept") != (before == "verify"):
            return "every verify is followed by how many draft tokens are accepted, and nothing else is"
        if turn.action == "accept" and any(taken > given for taken, given in zip(counts, last, strict=True)):
            return "more draft tokens accepted than were verified"
        if turn.action != "accept" and 0 in counts:
            return f"a turn to {turn.action} needs a token for each request"
        if turn.action == "resume" and 0 in (tracks or (0,)):
            return "only a snapshot of each request (track_lens) can be resumed"
        before, last = turn.action, counts
    if before in ("verify", "accept"):
        return "a story ends with a turn that shows the state that a verify left"
    return "a verify continues a cached prefix" if verifies and 0 in prefix else None
