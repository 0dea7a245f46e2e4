"""A gang that does not let requests wait for others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deployments.support.live import IMAGES, PROMPT, SMALL, TIMEOUT_S, config_of, live, picture, stream_of

MAX_WAIT_S = 0.05
LONG = {"num_inference_steps": 100}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(ray_cluster: None, pictures: Path) -> Iterator[str]:
    with live(config_of({"pictures": pictures}, policy="arrival", max_wait_s=MAX_WAIT_S)) as url:
        yield url


async def test_who_would_wait_too_long_is_refused_until_the_others_are_done(url: str) -> None:
    """Once it is known what steps take."""
    picture(url, seed=1)
    body = {"prompt": PROMPT, **SMALL, "seed": 2}
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        async with stream_of(client, {**LONG, "seed": 1}) as events:
            assert (await anext(events))["type"] == "troupe.progress"
            refused = await client.post(IMAGES, json=body)
            async for event in events:
                last = event
        assert last["type"] == "image_generation.completed", "it waits for nobody, however long it takes"
        taken = await client.post(IMAGES, json=body)
    assert refused.status_code == 429, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert error["code"] == "too_late"
    assert re.match(
        rf"it would take about .* s, and the longest wait, max_wait_s, is {MAX_WAIT_S:g};", error["message"]
    )
    assert taken.status_code == 200
