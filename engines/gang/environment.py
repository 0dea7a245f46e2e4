"""What a gang's ranks must find in their environment when their processes start: the loader reads some of it once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from engines.gang.config import Environment, GangConfig
from engines.gang.placement import rank_strategy


async def rank_environments(
    config: GangConfig, group: PlacementGroup, environment: Callable[[], Environment] | None
) -> Sequence[Environment]:
    """Variables for each rank, as ``environment`` answers on its node (where it may prepare files, too)."""
    if environment is None:
        return [{}] * config.num_ranks
    if config.num_nodes == 1:  # the group is packed: this process is on the node of its ranks
        return [environment()] * config.num_ranks
    firsts = [node * config.ranks_per_node for node in range(config.num_nodes)]
    asked: Any = ray.remote(num_cpus=0)(_answer)
    answers = [
        asked.options(scheduling_strategy=rank_strategy(config, rank, group)).remote(environment) for rank in firsts
    ]
    by_node: list[Environment] = list(await asyncio.gather(*answers))
    return [by_node[rank // config.ranks_per_node] for rank in range(config.num_ranks)]


def _answer(environment: Callable[[], Environment]) -> Environment:
    return environment()
