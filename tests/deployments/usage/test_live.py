"""With two replicas of the API of a running application, a key's limit is for both together."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployments.support.live import (
    IMAGES,
    PROMPT,
    SMALL,
    TIMEOUT_S,
    config_of,
    footprint,
    live,
    replica_pid,
    wait_until,
)

pytestmark = pytest.mark.slow

MAX_CONCURRENT = 3
NUM_AT_ONCE = 16
NUM_REPLICAS = {"Accounts": 1, "Ingress": 2}
LONG = {"num_inference_steps": 100, "size": "256x256"}
"""Runs while all others are refused, also by a replica that has just started: 16 times the usual tokens."""
NUM_LOOKS = 8
"""More than enough to reach both replicas."""


@pytest.fixture(scope="module")
def url(ray_cluster: None, pictures: Path) -> Iterator[str]:
    limits = [{"max_concurrent": MAX_CONCURRENT, "gpu_seconds_per_minute": 1000}]
    with live(config_of({"pictures": pictures}, api={"num_replicas": 2, "key_limits": limits})) as url:
        yield url


def ask(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}{IMAGES}", json={"prompt": PROMPT, **SMALL, **fields}, timeout=TIMEOUT_S)


def usage(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{url}/v1/usage", timeout=TIMEOUT_S).json()
    return answer


def figures(url: str) -> set[tuple[int, float]]:
    """Return the figures of all replicas."""
    return {(one["num_requests"], one["gpu_seconds"]) for one in (usage(url) for _ in range(NUM_LOOKS))}


def test_limits_hold_for_both_replicas_together(url: str) -> None:
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        answers = list(threads.map(lambda seed: ask(url, seed=seed, **LONG), range(NUM_AT_ONCE)))
    codes = Counter(one.status_code if one.is_success else one.json()["error"]["code"] for one in answers)
    assert codes == {200: MAX_CONCURRENT, "key_limit": NUM_AT_ONCE - MAX_CONCURRENT}
    for seed in range(6):
        assert ask(url, seed=seed, n=MAX_CONCURRENT).status_code == 200, "one after the other, at either replica"
    made = MAX_CONCURRENT + 6 * MAX_CONCURRENT
    wait_until(lambda: [one[0] for one in figures(url)] == [made], "both replicas say the same")


def test_limits_survive_their_keeper_and_a_replica(url: str) -> None:
    before = usage(url)
    ask(url, seed=0)
    for name in NUM_REPLICAS:
        os.kill(replica_pid(name), signal.SIGKILL)
        wait_until(lambda name=name: footprint()[name] == NUM_REPLICAS[name], f"another {name}")  # type: ignore[misc]
        wait_until(lambda: httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 200, "healthy")
        wait_until(lambda: ask(url, seed=0, n=MAX_CONCURRENT).status_code == 200, "there is room for all that may be")
        wait_until(lambda: usage(url)["num_requests"] > before["num_requests"], "the keeper knows what was used before")
    assert usage(url)["gpu_seconds"] > before["gpu_seconds"] > 0
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        statuses = Counter(threads.map(lambda seed: ask(url, seed=seed, **LONG).status_code, range(NUM_AT_ONCE)))
    assert statuses == {200: MAX_CONCURRENT, 429: NUM_AT_ONCE - MAX_CONCURRENT}
