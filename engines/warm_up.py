"""Warm-up at a gang's start: expected shapes, on every team that will run them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engines.core.engine import Engine
from engines.core.model import Branch, Mix

if TYPE_CHECKING:
    from engines.core.engine import RankContext

logger = logging.getLogger(__name__)


def release_unused_memory(device: str) -> None:
    """Give back what the allocator of a GPU keeps: a warm-up runs uncaptured first, which replays do not.

    All processes on the GPU share its memory. The log says what this one holds: what is missing from the GPU beside
    the ``held_bytes`` of all processes is their contexts and libraries.
    """
    if not device.startswith("cuda"):
        return
    import torch

    with torch.cuda.device(device):
        most = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        fields = {"held_bytes": torch.cuda.memory_reserved(), "most_bytes": most}
        fields |= {"tensor_bytes": torch.cuda.memory_allocated(), "free_bytes": torch.cuda.mem_get_info()[0]}
    logger.info("memory after the warm-up", extra=fields)


def warm_up(
    engine: Engine, steps: Iterable[tuple[Branch, ...]], context: RankContext, team_sizes: Sequence[int]
) -> None:
    """Warm up the engine for each of ``steps`` at each of ``team_sizes``. Collective over the gang."""
    for branches in steps:
        shapes = {name: tuple(x.shape) for name, x in branches[0].inputs.items()}
        for team_size in team_sizes:
            started_s = time.perf_counter()
            first = context.rank // team_size * team_size
            engine.warm_up(branches, tuple(range(first, first + team_size)))
            fields = {"rank": context.rank, "team_size": team_size, "took_s": round(time.perf_counter() - started_s, 3)}
            logger.info("shape is warm: %s", shapes, extra=fields)


def warm_up_additions(
    engine: Engine, steps: Iterable[tuple[Branch, ...]], mixes: Sequence[Mix], ranks: tuple[int, ...]
) -> None:
    """Change the weights to each of ``mixes`` once, and back, for a step of each module. Collective over ``ranks``.

    ``steps`` are warm. A first change of weights loads kernels, and allocates memory for the sums.
    """
    by_module = {step[0].module: step for step in steps}
    for mix in (*mixes, ()) if mixes else ():
        for branches in by_module.values():
            engine.predict(tuple(replace(branch, additions=mix) for branch in branches), ranks)
