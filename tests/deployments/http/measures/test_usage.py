"""Over HTTP, keys have usage and limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from deployments.clips.clips import Clips
from deployments.clips.settings import ClipSettings
from deployments.http.app import create_api
from deployments.http.settings import ApiSettings
from deployments.service.interface import Media, ServiceEvent
from deployments.usage.accounts import Accounts
from deployments.usage.api_keys import KeyRing, hash_of
from deployments.usage.metering import UsageMeter
from deployments.usage.quotas import KeyLimits
from pipelines.request import MediaRequest
from tests.deployments.clips.support.runs import QUICK
from tests.deployments.http.conftest import client_of
from tests.deployments.http.routes.test_images import IMAGES
from tests.deployments.http.routes.test_videos import finished
from tests.deployments.support.fake_service import GPU_S, FakeService
from tests.deployments.usage.conftest import SetTime

LIMITS = (
    KeyLimits(gpu_seconds_per_minute=2 * GPU_S, max_concurrent=2),
    KeyLimits(key=hash_of("large")[:10], weight=3),
)


class MeteredService:
    """A service that charges for its work, like the application's."""

    def __init__(self, service: FakeService, accounts: Accounts) -> None:
        self._service, self._meter = service, UsageMeter(accounts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    async def perform(self, request: MediaRequest, *args: Any) -> AsyncGenerator[ServiceEvent]:
        with self._meter.metered(request) as finish:
            async with aclosing(self._service.perform(request, *args)) as events:
                async for event in events:
                    if isinstance(event, Media):
                        finish(event.timings)
                    yield event


def metered(service: FakeService, folder: Path) -> FastAPI:
    """Return the API as in an ingress: clips and pictures in one account."""
    accounts = Accounts(LIMITS, clock=SetTime())
    counted: Any = MeteredService(service, accounts)
    settings = ApiSettings(data_dir=folder, keys=KeyRing(["small", "large"]), key_limits=LIMITS)
    clips = Clips(counted, ClipSettings(data_dir=folder, **QUICK))
    return create_api(counted, settings, clips, accounts=accounts)


def of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def used(client: httpx.AsyncClient, key: str) -> dict[str, Any]:
    answer = await client.get("/v1/usage", headers=of(key))
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()
    return usage


async def test_clips_are_under_way_as_pictures_are(service: FakeService, tmp_path: Path) -> None:
    """They count from request to end, queued or running: two may, so of three at once two are accepted."""
    service.permits = asyncio.Semaphore(0)
    async with client_of(metered(service, tmp_path)) as client:
        client.headers.update(of("small"))
        posts = [client.post("/v1/videos", json={"prompt": "a"}) for _ in range(3)]
        answers = await asyncio.gather(*posts)
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429]
        picture = await client.post(IMAGES, json={"prompt": "a"})
        assert (picture.status_code, picture.json()["error"]["code"]) == (429, "key_limit")
        assert "2 pictures and clips of this key under way; the limit is 2" in picture.text
        clip, other = (answer.json()["id"] for answer in answers if answer.status_code == 200)
        await client.delete(f"/v1/videos/{clip}")
        await client.delete(f"/v1/videos/{other}")
        service.permits = None
        assert (await client.post(IMAGES, json={"prompt": "a", "n": 2})).status_code == 200


async def test_keys_have_accounts_and_limits_of_their_own(service: FakeService, tmp_path: Path) -> None:
    async with client_of(metered(service, tmp_path)) as client:
        never = await client.post(IMAGES, json={"prompt": "a", "n": 3}, headers=of("small"))
        assert never.status_code == 400
        assert never.json()["error"]["message"] == "n is 3; it must be from 1 to 2", "no waiting would help"
        for num, status in ((2, 200), (1, 429)):
            answer = await client.post(IMAGES, json={"prompt": "a", "n": num}, headers=of("small"))
            assert answer.status_code == status, answer.text
        assert answer.json()["error"]["code"] == "key_limit"
        assert answer.headers["Retry-After"] == "60"
        answer = await client.post("/v1/videos", json={"prompt": "a"}, headers=of("small"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "key_limit")
        small, large = await used(client, "small"), await used(client, "large")
        assert (small["num_requests"], small["gpu_seconds"], small["gpu_seconds_last_minute"]) == (2, 3.0, 3.0)
        assert (small["weight"], small["max_concurrent"], small["gpu_seconds_per_minute"]) == (1.0, 2, 3.0)
        assert (large["num_requests"], large["weight"], large["max_concurrent"]) == (0, 3.0, None)
        clip = await client.post("/v1/videos", json={"prompt": "a"}, headers=of("large"))
        client.headers.update(of("large"))
        await finished(client, clip.json()["id"])
        assert (await used(client, "large"))["gpu_seconds"] == GPU_S
        assert {(one.key, one.weight) for one in service.performed} == {
            (hash_of("small"), 1.0),
            (hash_of("large"), 3.0),
        }
