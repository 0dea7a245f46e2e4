"""A node dies, or announces its end, while clients ask: each gets its answer with the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.serving.fake_nodes import Node
from benchmarks.serving.nodes import HOST, ROOT
from deployments.cli.serving import parse_config, reserved_port
from tests.deployments.support.bare import assert_same_picture, bare_frames
from tests.deployments.support.commands import short_folder
from tests.deployments.support.fake_nodes import FakeNodes, fake_nodes
from tests.deployments.support.live import asked_for, config_of, is_healthy, picture, pixels_of, wait_until
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODELS = {"pictures": ROOT / "pipelines" / "checkpoints" / "flux-shapes"}
GANGS = "Denoiser-pictures"
ON_ONE_NODE: dict[str, Any] = {"num_ranks": 1, "cpus_per_rank": 40, "num_replicas": 2, "max_running_jobs": 1}
"""Each gang fits a node of the type gpu4 of its own."""
NUM_CLIENTS = 8
LONG = {"num_inference_steps": 100}
"""Most of such a request's time is its gang's, so that several wait at each."""
START_S = 3 * PATIENCE_S
"""Time for two nodes to start on busy cores."""
NOTICE_S = 100


@pytest.fixture(scope="module")
def cluster(ray_cluster: None) -> Iterator[FakeNodes]:
    with short_folder() as folder, fake_nodes(folder, idle_timeout_s=PATIENCE_S) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def url(cluster: FakeNodes) -> Iterator[str]:
    document = config_of(MODELS, **ON_ONE_NODE).model_dump(mode="json")
    document["applications"][0]["args"]["models"][0]["stages"] = "together"
    with reserved_port(HOST) as port:
        cluster.deploy(parse_config(document).with_http(port=port))
        url = f"http://{HOST}:{port}"
        wait_until(lambda: is_healthy(url) and len(cluster.gangs(GANGS)) == 2, "both gangs run", patience_s=START_S)
        yield url


@pytest.fixture(scope="module")
def pictures(url: str) -> list[bytes]:
    made = [picture(url, seed=seed, **LONG) for seed in range(NUM_CLIENTS)]
    assert_same_picture(pixels_of(made[1]), bare_frames(MODELS, seed=1, **LONG)[0])
    return made


def node_of_a_gang(cluster: FakeNodes) -> tuple[str, Node]:
    """Return a gang and its node."""
    wait_until(lambda: len({*cluster.gangs(GANGS).values()}) == 2, "gangs on two nodes", patience_s=START_S)
    gang, node_id = next(iter(cluster.gangs(GANGS).items()))
    return gang, next(node for node in cluster.workers() if node.node_id == node_id)


def test_a_whole_node_that_dies_under_load_costs_no_request(
    cluster: FakeNodes, url: str, pictures: list[bytes]
) -> None:
    num_lost = len(cluster.lost_requests())
    with asked_for(url, pictures, num_clients=NUM_CLIENTS, **LONG):
        gang, node = node_of_a_gang(cluster)
        wait_until(lambda: node.node_id in cluster.busy_nodes(), "its gang works")
        cluster.kill(node)
        wait_until(lambda: gang not in cluster.gangs(GANGS), "Serve notices")
        wait_until(lambda: len({*cluster.gangs(GANGS).values()}) == 2, "a gang on a new node", patience_s=START_S)
    assert len(cluster.lost_requests()) > num_lost, "some were on it"


def test_a_node_that_will_be_taken_away_finishes_its_jobs_and_takes_no_more(
    cluster: FakeNodes, url: str, pictures: list[bytes]
) -> None:
    with asked_for(url, pictures, num_clients=NUM_CLIENTS, **LONG):
        gang, node = node_of_a_gang(cluster)
        wait_until(lambda: node.node_id in cluster.busy_nodes(), "its gang works")
        ranks = [pid for pid, node_id in cluster.nodes_of_ranks().items() if node_id == node.node_id]
        cluster.drain(node.node_id, NOTICE_S)
        wait_until(lambda: gang not in cluster.gangs(GANGS), "its gang gets no more requests")
        wait_until(lambda: len({*cluster.gangs(GANGS).values()} - {node.node_id}) == 2, "another", patience_s=START_S)
        wait_until(lambda: not {*ranks} & cluster.nodes_of_ranks().keys(), "its ranks have ended")
        cluster.kill(node)
        wait_until(lambda: all(other.node_id != node.node_id for other in cluster.workers()), "it is taken away")
    (told,) = cluster.logged("gang takes no more jobs")
    assert told["num_open"] > 1, "a job waited"
    begun = [line["time"] for line in cluster.logged("job begins") if line["log_pid"] in ranks]
    assert begun, "it worked"
    assert len([time for time in begun if time > told["time"]]) <= 1, "only the job that it had begun"
