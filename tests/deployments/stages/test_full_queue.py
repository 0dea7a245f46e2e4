"""A gang that has as many jobs as it takes."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployments.support.live import IMAGES, PROMPT, TIMEOUT_S, config_of, live, picture

NUM_RUNNING, NUM_WAITING = 2, 2
NUM_STEPS = 60

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(ray_cluster: None, pictures: Path) -> Iterator[str]:
    limits: dict[str, Any] = {"max_running_jobs": NUM_RUNNING, "max_waiting_jobs": NUM_WAITING}
    with live(config_of({"pictures": pictures}, **limits)) as url:
        yield url


async def test_a_full_queue_is_refused_with_the_time_to_wait(url: str) -> None:
    num_requests = NUM_RUNNING + NUM_WAITING + 3
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        body = {"prompt": PROMPT, "num_inference_steps": NUM_STEPS}
        answers = await asyncio.gather(*(client.post(IMAGES, json={**body, "seed": i}) for i in range(num_requests)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(refused) == 3
    for answer in refused:
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        error = answer.json()["error"]
        assert error["code"] == "queue_full"
        assert re.fullmatch(rf"{NUM_WAITING} jobs are waiting already; try again in about \d+ s", error["message"])
    drawn = {answer.json()["data"][0]["seed"]: answer for answer in answers if answer.status_code == 200}
    seed, answer = next(iter(drawn.items()))
    assert base64.b64decode(answer.json()["data"][0]["b64_json"]) == picture(
        url, seed=seed, num_inference_steps=NUM_STEPS
    )
