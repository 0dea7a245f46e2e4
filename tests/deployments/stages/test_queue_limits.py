"""Gangs refuse requests if the queue is full, or the wait too long."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployments.support.live import IMAGES, PROMPT, SMALL, TIMEOUT_S, config_of, live, picture, stream_of

MAX_WAIT_S = 0.05
LONG = {"num_inference_steps": 100}
NUM_RUNNING, NUM_WAITING = 2, 2
NUM_STEPS = 60

pytestmark = pytest.mark.slow


@pytest.fixture
def impatient(ray_cluster: None, pictures: Path) -> Iterator[str]:
    with live(config_of({"pictures": pictures}, policy="arrival", max_wait_s=MAX_WAIT_S)) as url:
        yield url


async def test_who_would_wait_too_long_is_refused_until_the_others_are_done(impatient: str) -> None:
    """This needs known step times."""
    picture(impatient, seed=1)
    body = {"prompt": PROMPT, **SMALL, "seed": 2}
    async with httpx.AsyncClient(base_url=impatient, timeout=TIMEOUT_S) as client:
        async with stream_of(client, {**LONG, "seed": 1}) as events:
            assert (await anext(events))["type"] == "troupe.progress"
            refused = await client.post(IMAGES, json=body)
            async for event in events:
                last = event
        assert last["type"] == "image_generation.completed", "it waits for no other, however long it takes"
        taken = await client.post(IMAGES, json=body)
    assert refused.status_code == 429, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert error["code"] == "too_late"
    assert re.match(
        rf"it would take about .* s, and the longest wait, max_wait_s, is {MAX_WAIT_S:g};", error["message"]
    )
    assert taken.status_code == 200


@pytest.fixture
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
