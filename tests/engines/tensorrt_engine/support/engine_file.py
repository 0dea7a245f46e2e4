"""What an engine file says of its collectives, beyond what the product reads in it."""

from __future__ import annotations

import re


def num_ranks_of(engine_file: bytes) -> int:
    """Returns the number of ranks in the program text; 1 where it names none, as without collectives."""
    world = re.search(rb"world_size = (\d+)", engine_file)
    return int(world.group(1)) if world else 1
