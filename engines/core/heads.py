"""Shares of attention heads per rank, for any number of ranks. Free of torch."""

from __future__ import annotations

from typing import NamedTuple


class HeadShare(NamedTuple):
    """The query and key heads of each of ``num_ranks`` ranks, zero padding at the end included.

    Every key head is first repeated ``repeats`` times in a row.
    """

    num_ranks: int
    queries: int
    keys: int
    repeats: int

    @property
    def all_queries(self) -> int:
        return self.num_ranks * self.queries

    @property
    def all_keys(self) -> int:
        return self.num_ranks * self.keys


def heads_of_one(num_heads: int, num_ranks: int) -> int:
    """Return the heads of each rank in equal shares, rounded up."""
    return -(-num_heads // num_ranks)


def share_heads(num_heads: int, num_key_heads: int, num_ranks: int) -> HeadShare:
    """Return equal shares of ``num_heads`` query heads, with the ``num_key_heads`` key heads that they need.

    Minimises query heads per rank, which cost attention time, then key heads. 32 and 8 heads on 4 ranks are 8 and 2
    each, on 16 ranks 2 and 1 (each key head twice). 30 on 4 ranks are 8 each, two of them padding. Raises ValueError
    if ``num_heads`` is no multiple of ``num_key_heads``.
    """
    if num_heads % num_key_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_key_heads} key heads: it must be a multiple")
    group = num_heads // num_key_heads
    best: HeadShare | None = None
    for repeats in range(1, group + 1):
        if group % repeats:
            continue
        keys = heads_of_one(num_key_heads * repeats, num_ranks)
        share = HeadShare(num_ranks=num_ranks, queries=keys * (group // repeats), keys=keys, repeats=repeats)
        if best is None or (share.queries, share.keys) < (best.queries, best.keys):
            best = share
    assert best is not None
    return best
