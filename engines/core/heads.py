"""How heads are shared out over ranks that each attend with some of them, whatever their number. Without torch."""

from __future__ import annotations

from typing import NamedTuple


class HeadShare(NamedTuple):
    """What each of ``num_ranks`` ranks gets: so many query heads and key heads, those of zeros at the end included.

    Before that every key head is there ``repeats`` times in a row.
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
    """The heads of each rank, where all get as many; those of the last may be more than there are."""
    return -(-num_heads // num_ranks)


def share_heads(num_heads: int, num_key_heads: int, num_ranks: int) -> HeadShare:
    """Equal shares of ``num_heads`` query heads, with the ``num_key_heads`` key heads that these need.

    A rank gets as few query heads as can be, since attention is what costs, and then as few key heads: 32 and 8 heads
    on 4 ranks are 8 and 2 each, on 16 ranks 2 and 1 (each key head twice); 30 on 4 ranks are 8 each, of which two are
    zeros. Raises ValueError if ``num_heads`` is no multiple of ``num_key_heads``.
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
