"""Two replicas of the running application on one PostgreSQL server, one of which is killed with clips in its hands."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

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

pytestmark = pytest.mark.slow

NUM_CLIPS, AT_ONCE = 8, 2
NUM_LOOKS = 8
"""More than enough to hear both replicas."""
LONG = {"size": "32x32", "num_inference_steps": 40}


@pytest.fixture(scope="module")
def url(ray_cluster: None, clips: Path, postgresql: str) -> Iterator[str]:
    api = {"num_replicas": 2, "database": postgresql, "max_concurrent_videos": AT_ONCE}
    with live(config_of({"clips": clips}, api=api, num_ranks=1)) as url:
        wait_until(lambda: all(is_healthy(url) for _ in range(NUM_LOOKS)), "both replicas know that the gang runs")
        yield url


def ask(url: str, seed: int) -> str:
    answer = httpx.post(f"{url}/v1/videos", json={"prompt": "a red circle", "seed": seed, **LONG}, timeout=TIMEOUT_S)
    assert answer.is_success, answer.text
    return str(answer.json()["id"])


def record(url: str, clip_id: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = httpx.get(f"{url}/v1/videos/{clip_id}", timeout=TIMEOUT_S).json()
    except httpx.TransportError:  # the replica that had the request was killed
        return {"status": "unknown"}
    return found


def content(url: str, clip_id: str) -> bytes:
    wait_until(lambda: record(url, clip_id)["status"] == "completed", f"clip {clip_id}")
    return httpx.get(f"{url}/v1/videos/{clip_id}/content", timeout=TIMEOUT_S).raise_for_status().content


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
    num_begun = len(log_lines("job begins")) - num_before
    assert NUM_CLIPS <= num_begun <= NUM_CLIPS + AT_ONCE, "no more again than the killed replica had in hand"
