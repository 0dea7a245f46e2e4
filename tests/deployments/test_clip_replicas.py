"""Two replicas of the API share one PostgreSQL server; one of them, or its node, is killed with running clips."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.nodes import HOST
from deployments.cli.serving import parse_config, reserved_port
from deployments.names import INGRESS
from tests.deployments.support.commands import short_folder
from tests.deployments.support.fake_nodes import FakeNodes, fake_nodes
from tests.deployments.support.live import (
    TIMEOUT_S,
    config_of,
    footprint,
    is_healthy,
    live,
    log_lines,
    replica_pid,
    wait_until,
)
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_CLIPS, AT_ONCE = 8, 2
NUM_LOOKS = 8
"""More than enough to reach both replicas."""
LONG = {"size": "32x32", "num_inference_steps": 40}
LONGER = {"num_inference_steps": 100}
"""Steps that last while a node is found and killed during the first clips."""
ONE_A_NODE = 10
"""CPUs of a replica: a node of the type gpu1 has room for one, and the head for none."""
START_S = 3 * PATIENCE_S
"""Time for two nodes to start on busy cores."""


def api(database: str, **values: Any) -> dict[str, Any]:
    return {"num_replicas": 2, "database": database, "max_concurrent_videos": AT_ONCE, **values}


@pytest.fixture
def url(ray_cluster: None, clips: Path, postgresql: str) -> Iterator[str]:
    with live(config_of({"clips": clips}, api=api(postgresql), num_ranks=1)) as url:
        wait_until(lambda: all(is_healthy(url) for _ in range(NUM_LOOKS)), "both replicas know that the gang runs")
        yield url


@pytest.fixture
def cluster(ray_cluster: None) -> Iterator[FakeNodes]:
    with short_folder() as folder, fake_nodes(folder, idle_timeout_s=PATIENCE_S) as nodes:
        yield nodes


@pytest.fixture
def url_of_nodes(cluster: FakeNodes, clips: Path, postgresql: str) -> Iterator[str]:
    """Yield the URL of two replicas, each on a node of its own. The gang is on the head."""
    config = config_of({"clips": clips}, api=api(postgresql, num_cpus=ONE_A_NODE), num_ranks=1)
    with reserved_port(HOST) as port:
        cluster.deploy(parse_config(config.model_dump(mode="json")).with_http(port=port))
        url = f"http://{HOST}:{port}"
        wait_until(lambda: len(nodes_of_replicas(cluster)) == 2, "replicas on two nodes", patience_s=START_S)
        wait_until(lambda: all(is_healthy(url) for _ in range(NUM_LOOKS)), "both know that the gang runs")
        yield url


def nodes_of_replicas(cluster: FakeNodes) -> set[str]:
    return {*cluster.gangs(INGRESS).values()}


def ask(url: str, seed: int, **body: Any) -> str:
    body = {"prompt": "a red circle", "seed": seed, **LONG, **body}
    answer = httpx.post(f"{url}/v1/videos", json=body, timeout=TIMEOUT_S)
    assert answer.is_success, answer.text
    return str(answer.json()["id"])


def record(url: str, clip_id: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = httpx.get(f"{url}/v1/videos/{clip_id}", timeout=TIMEOUT_S).json()
    except httpx.TransportError:  # the replica with the request was killed
        return {"status": "unknown"}
    return found


def content(url: str, clip_id: str) -> bytes:
    wait_until(lambda: record(url, clip_id).get("status") == "completed", f"clip {clip_id}")
    return httpx.get(f"{url}/v1/videos/{clip_id}/content", timeout=TIMEOUT_S).raise_for_status().content


def num_made_again(lines: Sequence[dict[str, Any]]) -> int:
    """Return how many clips were attempted twice: at most a replica's running ones. No attempt begins twice."""
    attempts = Counter(str(line["request_id"]) for line in lines)
    assert set(attempts.values()) == {1}, attempts
    owners = defaultdict(list)
    for attempt in attempts:  # in order of time
        clip, _, owner = attempt.rpartition("-")
        owners[clip].append(owner)
    assert len(owners) == NUM_CLIPS
    lost = [those for those in owners.values() if len(those) > 1]
    assert len(lost) <= AT_ONCE, owners
    assert all(len(those) == 2 for those in lost)
    return len(lost)


def test_a_killed_replica_loses_no_clip_and_none_is_made_twice(url: str) -> None:
    alone = [content(url, ask(url, seed)) for seed in range(2)]
    assert footprint()["Ingress"] == 2
    num_before = len(log_lines("job begins"))
    ids = [ask(url, seed) for seed in range(NUM_CLIPS)]
    wait_until(lambda: any(record(url, one)["status"] == "in_progress" for one in ids), "a clip is made")
    os.kill(replica_pid("Ingress"), signal.SIGKILL)
    made = [content(url, one) for one in ids]
    assert made[:2] == alone
    assert len(set(made)) == NUM_CLIPS, "each has its own seed"
    wait_until(lambda: footprint()["Ingress"] == 2, "another replica")
    num_made_again(log_lines("job begins")[num_before:])


def test_a_killed_node_loses_no_clip_and_none_is_made_twice(cluster: FakeNodes, url_of_nodes: str) -> None:
    url = url_of_nodes
    alone = [content(url, ask(url, seed, **LONGER)) for seed in range(2)]
    num_before = len(cluster.logged("job begins"))
    before = nodes_of_replicas(cluster)
    victim = next(node for node in cluster.workers() if node.node_id in before)
    assert not set(cluster.nodes_of_ranks().values()) & before, "the gang is elsewhere"
    ids = [ask(url, seed, **LONGER) for seed in range(NUM_CLIPS)]

    def both_work() -> bool:
        return len(cluster.logged("job begins")) - num_before > AT_ONCE

    wait_until(both_work, "more clips than one replica makes at once", at_once=True)
    cluster.kill(victim)
    made = [content(url, one) for one in ids]
    assert made[:2] == alone
    assert len(set(made)) == NUM_CLIPS, "each has its own seed"
    assert num_made_again(cluster.logged("job begins")[num_before:]) > 0, "it had some in its hands"
    wait_until(lambda: len(nodes_of_replicas(cluster) - {victim.node_id}) == 2, "another node", patience_s=START_S)
    num_lines = len(cluster.logged("job begins"))
    assert [content(url, one) for one in ids] == made, "the new replica has them too"
    assert len(cluster.logged("job begins")) == num_lines
