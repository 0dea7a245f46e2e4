"""Where a rank is: what everything that runs on one is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """A rank's number in its gang, the gang's size, and the device that is the rank's own ("cuda:0", "cpu").

    ``torch.distributed`` is initialised when code gets one (unless the rank is alone).
    """

    rank: int
    num_ranks: int
    device: str
