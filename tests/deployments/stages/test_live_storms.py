"""Under each policy, half of sixty streams disconnect at random moments while a rank is killed. The others get the
right answer or a refusal with a reason, and no place stays taken."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from engines.gang.policies.policy import POLICIES
from tests.deployments.support.live import (
    IMAGES,
    PROMPT,
    SMALL,
    TIMEOUT_S,
    config_of,
    finished,
    live,
    picture,
    rank_pids,
    wait_until,
)

pytestmark = pytest.mark.slow

NUM_RUNNING, NUM_WAITING = 3, 60
NUM_STREAMS, NUM_SEEDS = 60, 5
COME_WITHIN_S, LEAVE_WITHIN_S, KILL_AT_S = 1.5, 3.0, 2.0
ENDLESS = {"size": "128x128", "num_inference_steps": 100}
"""No such request ends before its client disconnects."""


@pytest.fixture(params=POLICIES)
def url(request: pytest.FixtureRequest, ray_cluster: None, pictures: Path) -> Iterator[str]:
    limits = {"policy": request.param, "max_running_jobs": NUM_RUNNING, "max_waiting_jobs": NUM_WAITING}
    with live(config_of({"pictures": pictures}, **limits)) as url:
        yield url


async def stay(client: httpx.AsyncClient, seed: int, reference: bytes) -> bool:
    """Return whether it was answered, with the right bytes. It may be refused while there is no gang."""
    body = {"prompt": PROMPT, **SMALL, "seed": seed, "stream": True}
    async with client.stream("POST", IMAGES, json=body) as response:
        if response.status_code != httpx.codes.OK:
            assert response.status_code == httpx.codes.SERVICE_UNAVAILABLE, await response.aread()
            assert int(response.headers["retry-after"]) >= 1
            return False
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert finished(json.loads(lines[-1].removeprefix("data: "))) == reference
    return True


async def leave(client: httpx.AsyncClient, after_s: float) -> None:
    """Disconnect, whatever was received until then."""
    body = {"prompt": PROMPT, **ENDLESS, "stream": True}
    with suppress(TimeoutError):
        async with asyncio.timeout(after_s), client.stream("POST", IMAGES, json=body) as response:
            async for line in response.aiter_lines():
                assert "image_generation.completed" not in line, "it is too long to end"


async def test_nobody_is_lost(url: str) -> None:
    rng = random.Random(20)
    references = [picture(url, seed=seed) for seed in range(NUM_SEEDS)]
    starts_s = [rng.uniform(0, COME_WITHIN_S) for _ in range(NUM_STREAMS)]
    stays_s = [rng.uniform(0, LEAVE_WITHIN_S) for _ in range(NUM_STREAMS)]
    pids = rank_pids("pictures")

    async def one(client: httpx.AsyncClient, i: int) -> bool:
        await asyncio.sleep(starts_s[i])
        if i % 2:
            return await stay(client, i % NUM_SEEDS, references[i % NUM_SEEDS])
        await leave(client, stays_s[i])
        return False

    async def strike() -> None:
        await asyncio.sleep(KILL_AT_S)
        os.kill(pids[-1], signal.SIGKILL)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        *answered, _ = await asyncio.gather(*(one(client, i) for i in range(NUM_STREAMS)), strike())
        assert sum(map(bool, answered)) > NUM_STREAMS // 4, "most remaining streams began before the kill"
        wait_until(lambda: rank_pids("pictures") != pids, "there is another gang")
        wait_until(lambda: httpx.get(f"{url}/health").status_code == httpx.codes.OK, "it is ready")
        places = range(NUM_RUNNING + NUM_WAITING)
        again = await asyncio.gather(*(stay(client, i % NUM_SEEDS, references[i % NUM_SEEDS]) for i in places))
    assert all(again), "no place is taken by a job of before"
