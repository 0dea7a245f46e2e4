"""Print the ranks' nodes. ``test_two_nodes.py`` runs this in a process of its own, since a process has one cluster."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

import ray
from ray.cluster_utils import Cluster

from engines.gang.gang_config import GangConfig
from tests.engines.gang.support.fakes import FakeRequest, fake_job, reference_latents
from tests.engines.gang.support.helpers import gang_of, latents

CONFIG = GangConfig(num_ranks=4, num_nodes=2, cpus_per_rank=0.5, start_deadline_s=60.0)


async def ranks_on_nodes() -> list[str]:
    request = FakeRequest(seed=1, num_steps=3)
    async with gang_of(CONFIG) as gang:
        assert (await latents(gang, fake_job("a", request))).equal(reference_latents(request))
        return [info.node_id for info in gang.infos]


def main() -> None:
    head = {"num_cpus": 2, "include_dashboard": False, "dashboard_agent_listen_port": 0}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    try:
        json.dump(asyncio.run(ranks_on_nodes()), sys.stdout)
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
