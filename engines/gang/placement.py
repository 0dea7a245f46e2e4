"""Placement of a gang: the bundles of its deployment's placement group, and each rank's bundle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engines.gang.gang_config import GangConfig

Bundle = dict[str, float]
LEAST_CPUS = 0.001
"""CPUs of a bundle that nothing runs in; Ray has no empty ones."""


def gang_bundles(config: GangConfig, *, replica_cpus: float) -> list[Bundle]:
    """Return the ``placement_group_bundles``: bundle 0 for the replica, 1…N for a rank each.

    A gang of several nodes has one bundle per node for all ranks of that node; the first also holds the replica.
    """
    if config.num_nodes == 1:
        return [{"CPU": replica_cpus}] + [_rank_bundle(config, 1) for _ in range(config.num_ranks)]
    bundles = [_rank_bundle(config, config.ranks_per_node) for _ in range(config.num_nodes)]
    bundles[0]["CPU"] = bundles[0].get("CPU", 0.0) + replica_cpus
    return bundles


def shared_bundles(configs: Sequence[GangConfig]) -> list[Bundle]:
    """Return the bundles of gangs on the same GPUs, of one node each: bundle 0 for nothing else, 1…N for a GPU each.

    A bundle has the GPU share of one rank, above one half, so no two bundles are on one GPU. Ranks of one number in
    different gangs divide their bundle.
    """
    ranks = range(max(config.num_ranks for config in configs))
    here = [[config for config in configs if rank < config.num_ranks] for rank in ranks]
    sizes = [{"CPU": sum(one.cpus_per_rank for one in ones), "GPU": ones[0].gpus_per_rank} for ones in here]
    return [{"CPU": LEAST_CPUS}, *({name: amount for name, amount in size.items() if amount} for size in sizes)]


def gang_strategy(config: GangConfig) -> Literal["STRICT_PACK", "STRICT_SPREAD"]:
    """Return the ``placement_group_strategy``: all on one node, or one bundle on each of ``num_nodes``."""
    return "STRICT_PACK" if config.num_nodes == 1 else "STRICT_SPREAD"


def rank_bundle_index(config: GangConfig, rank: int) -> int:
    """Return the bundle of ``rank``; ranks fill the nodes in node order."""
    return 1 + rank if config.num_nodes == 1 else rank // config.ranks_per_node


def rank_strategy(config: GangConfig, rank: int, group: PlacementGroup) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=rank_bundle_index(config, rank), placement_group_capture_child_tasks=True
    )


def current_group() -> PlacementGroup:
    """Return the placement group of this process: the replica's own."""
    group = get_current_placement_group()
    if group is None:
        raise ValueError(
            "a gang starts in the placement group of its deployment, and this process is in none: give the deployment "
            "placement_group_bundles=gang_bundles(...), or pass placement_group to Gang.start"
        )
    return group


def _rank_bundle(config: GangConfig, num_ranks: int) -> Bundle:
    resources = {"CPU": num_ranks * config.cpus_per_rank, "GPU": num_ranks * config.gpus_per_rank}
    return {name: amount for name, amount in resources.items() if amount}
