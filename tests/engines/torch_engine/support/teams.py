"""Teams and their axes as one rank sees them, without process groups."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engines.parallel.collectives import Axis
from engines.parallel.mesh import Team, team_of_one

WORLD = 4


def axis_of(rank: int, world: int = WORLD) -> Axis:
    return Axis(ranks=tuple(range(world)), index=rank)


def team_of(**sizes: int) -> Team:
    """Return the first rank's team, with context axes of these sizes."""
    axes: dict[str, Any] = {name: axis_of(0, size) for name, size in sizes.items()}
    return replace(team_of_one(), **axes, context=axis_of(0, math.prod(sizes.values())))
