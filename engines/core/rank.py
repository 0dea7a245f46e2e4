"""A rank's place in its gang."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """A rank's number in its gang, the gang's size, and the rank's own device ("cuda:0", "cpu").

    ``torch.distributed`` is initialised before a context exists (unless the rank is alone).
    """

    rank: int
    num_ranks: int
    device: str
