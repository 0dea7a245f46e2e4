"""Bundles and indices are right; the groups are tested with their gangs."""

from __future__ import annotations

import pytest

from engines.gang.gang_config import GangConfig
from engines.gang.placement import gang_bundles, gang_strategy, rank_bundle_index, shared_bundles


def test_a_gang_on_one_node_has_a_bundle_per_rank_behind_the_replica() -> None:
    config = GangConfig(num_ranks=3, cpus_per_rank=2, gpus_per_rank=1)
    assert gang_bundles(config, replica_cpus=1) == [{"CPU": 1}] + [{"CPU": 2, "GPU": 1}] * 3
    assert gang_strategy(config) == "STRICT_PACK"
    assert [rank_bundle_index(config, rank) for rank in range(3)] == [1, 2, 3]


def test_gangs_that_share_gpus_have_a_bundle_for_each_that_a_rank_of_each_fits() -> None:
    wide = GangConfig(num_ranks=2, cpus_per_rank=2, gpus_per_rank=0.8)
    narrow = GangConfig(num_ranks=1, cpus_per_rank=1, gpus_per_rank=0.8)
    first, *bundles = shared_bundles([narrow, wide])
    assert bundles == [{"CPU": 3, "GPU": 0.8}, {"CPU": 2, "GPU": 0.8}], "no two bundles fit one GPU"
    assert first.keys() == {"CPU"}
    without = GangConfig(num_ranks=1, cpus_per_rank=1)
    assert shared_bundles([without, without])[1:] == [{"CPU": 2}]


def test_a_gang_without_gpus_asks_for_none() -> None:
    config = GangConfig(num_ranks=2, cpus_per_rank=0.5)
    assert gang_bundles(config, replica_cpus=0.1) == [{"CPU": 0.1}, {"CPU": 0.5}, {"CPU": 0.5}]


def test_a_gang_wider_than_a_node_has_a_bundle_per_node_and_ranks_in_node_order() -> None:
    config = GangConfig(num_ranks=16, num_nodes=2, cpus_per_rank=4, gpus_per_rank=1)
    assert gang_bundles(config, replica_cpus=1) == [{"CPU": 33, "GPU": 8}, {"CPU": 32, "GPU": 8}]
    assert gang_strategy(config) == "STRICT_SPREAD"
    assert [rank_bundle_index(config, rank) for rank in range(16)] == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_ranks": 0}, "num_ranks is 0; it must be at least 1"),
        ({"num_nodes": 3}, "num_nodes is 3; it must be a divisor of num_ranks=4"),
        ({"gpus_per_rank": 0.5}, "gpus_per_rank is 0.5; it must be 0, or above 0.5"),
        ({"cpus_per_rank": 0}, "cpus_per_rank is 0; it must be above 0 for ranks without GPUs"),
        ({"step_deadline_s": 0}, "step_deadline_s is 0; it must be a time above 0 s"),
        ({"max_waiting_jobs": -1}, "max_waiting_jobs is -1; it must be 0 or more"),
    ],
)
def test_a_wrong_config_says_what_is_allowed(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GangConfig(**({"num_ranks": 4, "cpus_per_rank": 1} | fields))  # type: ignore[arg-type]
