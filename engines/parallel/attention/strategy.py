"""The attention kernel of a team: strategies wrapped round one another as its spec says."""

from __future__ import annotations

from collections.abc import Callable

from engines.core.kernel import Kernel
from engines.core.layout import TokenLayout
from engines.parallel.attention.allgather_kv import allgather_kv
from engines.parallel.attention.local import crop_keys
from engines.parallel.attention.ring import ring
from engines.parallel.attention.ulysses import ulysses, ulysses_in_parts
from engines.parallel.communication.mesh import Team

MakeKernel = Callable[[Kernel, Team, TokenLayout], Kernel]
"""Attention over the tokens of a team, from attention on one device."""


def team_kernel(local: Kernel, team: Team, layout: TokenLayout, *, num_parts: int = 1) -> Kernel:
    """``local`` made to attend over the tokens of the whole team: ulysses(ring(local)), ulysses(allgather_kv(local)).

    Padded keys are dropped by the innermost layer, where it is known which rows they are. With ``num_parts`` above 1
    ulysses exchanges the heads in so many parts.
    """
    inner = team.ulysses.size
    if team.ring.size > 1:
        rows = tuple(layout.valid_rows(turn * inner, inner) for turn in range(team.ring.size))
        kernel = ring(local, team.ring, rows)
    else:
        kernel = crop_keys(local, layout.valid_rows(0, layout.num_chunks))
        kernel = allgather_kv(kernel, team.allgather_kv) if team.allgather_kv.size > 1 else kernel
    if inner == 1:
        return kernel
    return ulysses(kernel, team.ulysses) if num_parts == 1 else ulysses_in_parts(kernel, team.ulysses, num_parts)
