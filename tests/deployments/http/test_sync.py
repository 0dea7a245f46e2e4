"""POST /v1/videos/sync returns the MP4 itself, once it is made."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from typing import Any

import httpx
import pytest

from engines.core.engine import JobFailedError
from engines.gang.errors import GangBrokenError
from pipelines.request import MediaRequest
from tests.deployments.http.test_disconnect import until
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import FakeService

SYNC = "/v1/videos/sync"


@pytest.mark.parametrize("how", ["json", "data"])
async def test_the_file_is_the_answer(client: httpx.AsyncClient, how: str) -> None:
    body = {"prompt": "a", "size": "32x48", "seed": -1 if how == "json" else "-1"}
    sent: dict[str, Any] = {how: body}
    answer = await client.post(SYNC, **sent)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "video/mp4")
    video_id = answer.headers["x-troupe-video-id"]
    assert answer.content == (await client.get(f"/v1/videos/{video_id}/content")).content
    assert (await client.get(f"/v1/videos/{video_id}")).json()["size"] == "32x48"
    assert answer.headers["server-timing"].startswith("queue;dur=")
    again = await client.post(SYNC, **sent, headers={"If-None-Match": "*", "Range": "bytes=0-9"})
    assert again.status_code == 200, "conditions and ranges are for GET"
    assert len(again.content) > 10


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (GangBrokenError("rank 1 died"), 502, "gang_broken"),
        (JobFailedError("its latents are not finite"), 500, "job_failed"),
        (ValueError("prompt has 900 tokens; 512 are allowed"), 400, "invalid_value"),
    ],
)
async def test_a_clip_that_fails(
    client: httpx.AsyncClient, service: FakeService, failure: Exception, status: int, code: str
) -> None:
    def fail(request: MediaRequest, step: int) -> None:
        raise failure

    service.at_step = fail
    answer = await client.post(SYNC, json={"prompt": "a"})
    error = error_of(answer, status)
    assert error["code"] == code
    assert str(failure) in error["message"]
    assert answer.headers["x-should-retry"] == "false"


async def test_a_clip_without_room_on_the_disk(client: httpx.AsyncClient, service: FakeService) -> None:
    def fail(request: MediaRequest, step: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    service.at_step = fail
    assert error_of(await client.post(SYNC, json={"prompt": "a"}), 507)["code"] == "storage_full"


async def test_a_wrong_body_queues_nothing(client: httpx.AsyncClient) -> None:
    error_of(await client.post(SYNC, json={"prompt": "a", "num_frames": 2}), 400)
    assert (await client.get("/v1/videos")).json()["data"] == []


async def test_a_client_that_is_gone_takes_its_clip_along(client: httpx.AsyncClient, service: FakeService) -> None:
    service.step_s = 1000
    request = asyncio.create_task(client.post(SYNC, json={"prompt": "a"}))
    await until(lambda: len(service.performed) == 1)
    while not request.done():  # like Ray Serve, until it is over
        request.cancel()
        await asyncio.sleep(0)
    with contextlib.suppress(asyncio.CancelledError):
        await request
    assert len(service.closed) == 1
    assert (await client.get("/v1/videos")).json()["data"] == []


async def test_a_clip_that_is_deleted_meanwhile(client: httpx.AsyncClient, service: FakeService) -> None:
    service.step_s = 1000
    request = asyncio.create_task(client.post(SYNC, json={"prompt": "a"}))
    await until(lambda: len(service.performed) == 1)
    (video,) = (await client.get("/v1/videos")).json()["data"]
    await client.delete(f"/v1/videos/{video['id']}")
    assert error_of(await request, 404)["code"] == "video_not_found"
