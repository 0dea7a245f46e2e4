"""Nodes come when a gang needs them and go when it is gone; a node that dies costs no request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from benchmarks.serving.nodes import HOST, ROOT
from deployments.cli.serving import parse_config, reserved_port
from tests.deployments.support.bare import assert_same_picture, bare_frames
from tests.deployments.support.commands import short_folder
from tests.deployments.support.fake_nodes import FakeNodes, fake_nodes
from tests.deployments.support.live import asked_for, config_of, is_healthy, picture, pixels_of, wait_until
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.ray

MODELS = dict.fromkeys(("pictures", "wide", "apart"), ROOT / "pipelines" / "checkpoints" / "flux-shapes")
FIRST = ("pictures", "wide")
GANGS = "Denoiser-pictures"
ON_ONE_NODE = {"num_ranks": 1, "cpus_per_rank": 40}
"""Fits a node of the type gpu4, and no smaller one."""
ON_ANY_NODE = {"num_ranks": 1, "cpus_per_rank": 10}
ON_TWO_NODES = {"num_ranks": 2, "cpus_per_rank": 20, "num_nodes": 2}
SCALING = {
    "min_replicas": 0,
    "max_replicas": 2,
    "target_ongoing_requests": 1.5,
    "look_back_period_s": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 2,
}
STAGE_SCALING = SCALING | {"max_replicas": 1}
STAGES_OF_APART = ("TextEncoder-apart", "Denoiser-apart", "VaeDecoder-apart")
BY_WORK = {"min_replicas": 0, "max_replicas": 2, "target_wait_s": 1.0, "idle_s": 3.0}
IDLE_TIMEOUT_S = 3.0
START_S = 3 * PATIENCE_S
"""Time for nodes to start on busy cores, and gangs on them."""
NUM_CLIENTS = 4
"""Enough clients for two gangs; one client is enough for one."""
LONG = {"num_inference_steps": 24}
"""Most of such a request's time is its gang's, which counts. Short requests hardly keep two gangs busy, which then come
and go."""


@pytest.fixture(scope="module")
def cluster(ray_cluster: None) -> Iterator[FakeNodes]:
    """Start a cluster whose nodes fork their workers from the zygote of the session's own cluster."""
    with short_folder() as folder, fake_nodes(folder, idle_timeout_s=IDLE_TIMEOUT_S) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def url(cluster: FakeNodes) -> Iterator[str]:
    document = config_of(MODELS, autoscaling=SCALING).model_dump(mode="json")
    pictures, wide, apart = document["applications"][0]["args"]["models"]
    pictures["denoiser"] |= ON_ONE_NODE
    wide["denoiser"] |= {**ON_TWO_NODES, "autoscaling": BY_WORK}
    for model in (pictures, wide):
        model["stages"] = "together"
    apart["denoiser"] |= ON_ANY_NODE
    for stage in ("text_encoder", "decoder"):  # no room on the head, as if they had a GPU
        apart[stage] |= {"num_cpus": 10, "autoscaling": STAGE_SCALING}
    with reserved_port(HOST) as port:
        cluster.deploy(parse_config(document).with_http(port=port))
        url = f"http://{HOST}:{port}"
        wait_until(lambda: is_healthy(url), "the application is ready, without a gang", patience_s=START_S)
        yield url


@pytest.fixture(scope="module")
def first(cluster: FakeNodes, url: str) -> dict[str, bytes]:
    """Return a picture of two models, both requested at once without a gang or a node."""
    wait_until(lambda: not cluster.workers(), "no node but the head")
    assert not any(cluster.gangs(f"Denoiser-{model}") for model in MODELS)
    with ThreadPoolExecutor() as threads:
        made = threads.map(lambda model: picture(url, model=model, seed=0), FIRST)
        return dict(zip(FIRST, made, strict=True))


@pytest.fixture(scope="module")
def pictures(url: str) -> list[bytes]:
    """Return as many seeds' pictures as there are clients, made once for all tests: gangs go while one client asks."""
    return [picture(url, seed=seed, **LONG) for seed in range(NUM_CLIENTS)]


def assert_right(data: bytes, seed: int) -> None:
    assert_same_picture(pixels_of(data), bare_frames(MODELS, seed=seed)[0])


def nodes_of_newest_gang(cluster: FakeNodes, model: str) -> list[str]:
    """Return the nodes of its ranks; none if there is no gang yet, or a rank is gone."""
    nodes, gangs = cluster.nodes_of_ranks(), cluster.rank_pids(model)
    pids = gangs[-1] if gangs else []
    return [nodes[pid] for pid in pids] if nodes.keys() >= set(pids) else []


def test_with_no_gang_and_no_node_a_request_gets_both_and_its_picture(
    cluster: FakeNodes, url: str, first: dict[str, bytes]
) -> None:
    assert is_healthy(url)
    with asked_for(url, [first["pictures"]]):
        gangs = wait_until(lambda: cluster.gangs(GANGS), "the gang, after none", patience_s=START_S)
        (node_id,) = gangs.values()
        (node,) = [node for node in cluster.workers() if node.node_id == node_id]
        assert node.node_type == "gpu4", "the smallest that holds the gang"
    assert_right(first["pictures"], seed=0)


def test_a_gang_over_two_nodes_paints_a_picture(cluster: FakeNodes, url: str, first: dict[str, bytes]) -> None:
    with asked_for(url, [first["wide"]], model="wide"):
        node_ids = wait_until(lambda: nodes_of_newest_gang(cluster, "wide"), "the gang, after none", patience_s=START_S)
        assert len(set(node_ids)) == 2
        assert set(node_ids) <= {node.node_id for node in cluster.workers()}, "the head has no rank"
    assert_right(first["wide"], seed=0)
    wait_until(lambda: not cluster.gangs("Denoiser-wide"), "no work, and no gang")


def test_a_node_that_dies_under_load_costs_no_request(cluster: FakeNodes, url: str, pictures: list[bytes]) -> None:
    num_lost = len(cluster.lost_requests())
    with asked_for(url, pictures, num_clients=NUM_CLIENTS, **LONG):
        busy = wait_until(
            lambda: cluster.busy_nodes() & {*cluster.gangs(GANGS).values()}, "a gang that works", patience_s=START_S
        )
        node_id = next(iter(busy))
        next(node.raylet for node in cluster.workers() if node.node_id == node_id).kill()
        wait_until(lambda: len(cluster.lost_requests()) > num_lost, "Ray notices, and requests lose their gang")
        wait_until(lambda: set(cluster.gangs(GANGS).values()) - {node_id}, "a gang on another node", patience_s=START_S)
    wait_until(lambda: node_id not in cluster.gangs(GANGS).values(), "Serve knows that the gang is gone")


def test_nodes_and_gangs_follow_the_load_and_lose_no_request(
    cluster: FakeNodes, url: str, pictures: list[bytes]
) -> None:
    with asked_for(url, pictures, num_clients=NUM_CLIENTS, **LONG):
        wait_until(
            lambda: len(set(cluster.gangs(GANGS).values())) == 2, "a second gang on a second node", patience_s=START_S
        )
        wait_until(
            lambda: len(cluster.busy_nodes() & {*cluster.gangs(GANGS).values()}) == 2,
            "both gangs work",
            patience_s=START_S,
        )
    with asked_for(url, pictures, **LONG):
        wait_until(lambda: len(cluster.gangs(GANGS)) == 1, "one gang goes, in the midst of work")
    wait_until(lambda: not cluster.gangs(GANGS), "no requests, and no gang")
    wait_until(lambda: not cluster.workers(), "no node but the head")


@pytest.mark.slow
def test_nodes_of_encoder_and_decoder_end_while_the_api_stays(cluster: FakeNodes, url: str) -> None:
    wait_until(lambda: not cluster.workers(), "no node but the head")
    api = cluster.gangs("Ingress")
    (head,) = api.values()
    made = picture(url, model="apart", seed=0)
    assert_right(made, seed=0)
    with asked_for(url, [made], model="apart"):
        stages = {
            name: wait_until(partial(cluster.gangs, name), f"a replica of {name}", patience_s=START_S)
            for name in STAGES_OF_APART
        }
        nodes = {node_id for replicas in stages.values() for node_id in replicas.values()}
        assert head not in nodes
        assert nodes <= {node.node_id for node in cluster.workers()}
    wait_until(lambda: not any(map(cluster.gangs, STAGES_OF_APART)), "no requests, and no replica of a stage")
    wait_until(lambda: not cluster.workers(), "no node but the head")
    assert is_healthy(url)
    assert cluster.gangs("Ingress") == api
