"""Read an engine file's collectives, beyond what the product reads in it."""

from __future__ import annotations

import re


def num_ranks_of(engine_file: bytes) -> int:
    """Return the number of ranks in the program text; 1 if it names none, as without collectives."""
    world = re.search(rb"world_size = (\d+)", engine_file)
    return int(world.group(1)) if world else 1
