"""A stopping server accepts nothing new, lets running requests end for a while, and then ends them with an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from deployments.clips.clips import Clips
from deployments.clips.settings import ClipSettings
from deployments.http.app import create_api
from deployments.http.drain import Drain
from deployments.http.settings import ApiSettings
from tests.deployments.clips.support.runs import QUICK
from tests.deployments.http.conftest import Watch, client_of
from tests.deployments.http.support.events import sse
from tests.deployments.http.test_disconnect import until
from tests.deployments.support.fake_service import FakeService

IMAGES = "/v1/images/generations"


@pytest.fixture
def service() -> FakeService:
    return FakeService(permits=asyncio.Semaphore(0))


@pytest.fixture
def clips(service: FakeService, tmp_path: Path) -> Clips:
    return Clips(service, ClipSettings(data_dir=tmp_path, **QUICK))


@asynccontextmanager
async def draining(service: FakeService, clips: Clips, folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Drain]]:
    drain = Drain()
    app = create_api(service, ApiSettings(data_dir=folder, video_poll_s=0.02), clips, drain)
    async with client_of(app) as client:
        yield client, drain


async def test_what_is_under_way_ends_and_what_comes_is_refused(
    service: FakeService, clips: Clips, tmp_path: Path
) -> None:
    async with draining(service, clips, tmp_path) as (client, drain):
        picture = asyncio.create_task(client.post(IMAGES, json={"prompt": "a"}))
        await until(lambda: service.performed)
        assert (await client.get("/live")).status_code == 200
        ending = asyncio.create_task(drain.finish(grace_s=3600))
        await until(lambda: drain.has_begun)
        refused = await client.post(IMAGES, json={"prompt": "b"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")
        assert int(refused.headers["retry-after"]) > 0
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/live")).json()["error"]["code"] == "server_stopping"
        assert not ending.done()
        service.permit(4)
        assert (await picture).status_code == 200
        await ending
    assert [request.prompt for request in service.performed] == ["a"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_takes_too_long_is_told(
    service: FakeService, clips: Clips, tmp_path: Path, first_bytes: asyncio.Event, stream: bool
) -> None:
    async with draining(service, clips, tmp_path) as (client, drain):
        body = {"prompt": "a"} | ({"stream": True, "stream_progress": True} if stream else {})
        picture = asyncio.create_task(client.post(IMAGES, json=body))
        service.permit()
        await until(lambda: first_bytes.is_set() if stream else service.performed)
        await drain.finish(grace_s=0.0)
        answer = await picture
    if stream:
        name, event = sse(answer)[-1]
        assert (answer.status_code, name) == (200, "error")
    else:
        assert answer.status_code == 503
        event = answer.json()
    assert event["error"]["code"] == "server_stopping", json.dumps(event)
    assert len(service.closed) == 1, "the job was stopped"


async def test_watchers_go_at_once_and_clips_are_queued_again(
    service: FakeService, clips: Clips, tmp_path: Path, watch: Watch
) -> None:
    async with draining(service, clips, tmp_path) as (client, drain):
        video = (await client.post("/v1/videos", json={"prompt": "a"})).json()
        watching = await watch(client, video["id"])
        await until(lambda: service.performed)
        ending = asyncio.create_task(drain.finish(grace_s=3600))
        assert sse(await watching)[-1][1]["error"]["code"] == "server_stopping"
        await clips.stop()
        await ending
    again = Clips(service, ClipSettings(data_dir=tmp_path, **QUICK))
    service.reasons["fake-clips"] = "takes no clip"
    await again.start()
    record = await again.get(video["id"])
    await again.stop()
    assert record is not None
    assert (record.status, record.attempts) == ("queued", 0)
