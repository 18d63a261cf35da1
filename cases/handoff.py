"""Handoff: batches of the same requests, each of which reads what the one before wrote."""

from __future__ import annotations

from attnmatrix.cases.case import Case, ForwardMode


def conversation(case: Case) -> tuple[Case, ...]:
    """A conversation that starts with the extend batch ``case``: a decode step, a second turn of one token, which an engine extends by
    like any other, and another decode step.

    In a pair ``prefill,decode`` the two alternate, and each reads what the other wrote.
    """
    found = [case]
    for forward in (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.DECODE):
        last = found[-1]
        found.append(last.but(forward=forward, prefix_lens=last.kv_lens, new_lens=(1,) * case.batch_size, seed=last.seed + 1))
    return tuple(found)
