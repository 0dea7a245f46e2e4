"""With two gangs of one model, requests go where they finish first, not to the shorter queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployments.support.live import TIMEOUT_S, config_of, live, stream_of, streamed

LONG, SHORT = {"num_inference_steps": 100}, {"num_inference_steps": 4}
NUM_SHORT = 4
"""By number of requests, at least one of these would go behind the long one."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(ray_cluster: None, pictures: Path) -> Iterator[str]:
    gangs: dict[str, Any] = {"num_replicas": 2, "num_ranks": 1, "strategy": "auto", "policy": "arrival"}
    with live(config_of({"pictures": pictures}, **gangs)) as url:
        yield url


async def test_short_requests_go_past_the_gang_with_one_long_job(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        for _ in range(3):  # until both gangs have measured steps
            await asyncio.gather(*(streamed(client, seed=seed, **SHORT) for seed in range(2 * NUM_SHORT)))
        async with stream_of(client, {**LONG, "seed": 1}) as events:
            assert (await anext(events))["type"] == "troupe.progress"
            shorts = asyncio.gather(*(streamed(client, seed=seed, **SHORT) for seed in range(NUM_SHORT)))
            async for event in events:
                if shorts.done():
                    break
                last = event
            assert len(await shorts) == NUM_SHORT
            assert last["type"] == "troupe.progress", "they did not wait for its end"
