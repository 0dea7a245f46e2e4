"""The field ``cache`` over HTTP has its effect, and the answer says so."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.deployments.http.routes.test_images import IMAGES
from tests.deployments.http.routes.test_videos import finished
from tests.deployments.support.fake_service import FakeService

ENOUGH = {"num_inference_steps": 12}


@pytest.mark.parametrize(("fields", "mode"), [({}, "off"), ({"cache": None}, "off"), ({"cache": "fast"}, "fast")])
async def test_pictures_are_made_with_it_and_say_so(
    client: httpx.AsyncClient, service: FakeService, fields: dict[str, Any], mode: str
) -> None:
    answer = await client.post(IMAGES, json={"prompt": "a", "n": 2, **ENOUGH, **fields})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["cache"], answer.headers["X-Troupe-Cache"]) == (mode, mode)
    assert [request.cache for request in service.performed] == [mode, mode]


async def test_a_streamed_picture_says_so(client: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "stream": True, "cache": "conservative", **ENOUGH}
    answer = await client.post(IMAGES, json=body)
    data = [line.removeprefix("data:") for line in answer.text.splitlines() if line.startswith("data:")]
    completed = next(event for one in data if (event := json.loads(one))["type"] == "image_generation.completed")
    assert completed["cache"] == "conservative"


@pytest.mark.parametrize("as_form", [False, True], ids=["json", "form"])
async def test_a_clip_keeps_it_until_it_is_made(client: httpx.AsyncClient, service: FakeService, as_form: bool) -> None:
    body = {"prompt": "a", "cache": "fast", **ENOUGH}
    sent: dict[str, Any] = {"data" if as_form else "json": body}
    answer = await client.post("/v1/videos", **sent)
    assert answer.status_code == 200, answer.text
    assert (await finished(client, answer.json()["id"]))["cache"] == "fast"
    assert [request.cache for request in service.performed] == ["fast"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache": "quick"}, "it must be off, conservative or fast"),
        ({"cache": True}, "it must be off, conservative or fast"),
        (
            {"cache": "fast", "num_inference_steps": 9},
            "cache is 'fast', which needs 10 steps or more, and num_inference_steps is 9",
        ),
    ],
)
async def test_what_cannot_be_is_told(
    client: httpx.AsyncClient, service: FakeService, fields: dict[str, Any], message: str
) -> None:
    answer = await client.post(IMAGES, json={"prompt": "a", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "cache"), answer.text
    assert message in error["message"]
    assert not service.performed
