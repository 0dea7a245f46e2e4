"""Watchers take no place from workers, and excess requests are refused before any work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.clips.clips import Clips
from deployments.clips.database import ClipRecord
from deployments.config import AppConfig
from deployments.http.admission import Places
from deployments.http.errors import ApiError
from deployments.names import FULL_HEADER
from tests.deployments.http.conftest import build, client_of, serving
from tests.deployments.http.test_disconnect import until
from tests.deployments.support.fake_service import FakeService

IMAGES = "/v1/images/generations"
NUM_WATCHERS = 300


@asynccontextmanager
async def watchers(client: httpx.AsyncClient, video_id: str, num: int) -> AsyncIterator[None]:
    """Open ``num`` streams of events, each past its first event."""
    open_lines = []  # a stream whose iterator is dropped is closed
    async with AsyncExitStack() as stack:

        async def watch() -> None:
            answer = await stack.enter_async_context(client.stream("GET", f"/v1/videos/{video_id}/events"))
            assert answer.status_code == 200
            open_lines.append(lines := answer.aiter_lines())
            await anext(lines)

        await asyncio.gather(*(watch() for _ in range(num)))
        yield


async def test_300_watchers_leave_room_for_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, looks = FakeService(), []
    get_all = Clips.get_all

    async def counted(clips: Clips, clip_ids: Collection[str]) -> dict[str, ClipRecord]:
        looks.append(list(clip_ids))
        return await get_all(clips, clip_ids)

    monkeypatch.setattr(Clips, "get_all", counted)
    no_limit = httpx.Limits(max_connections=None)
    with serving(build(service, tmp_path, max_watchers=NUM_WATCHERS)) as url:
        async with httpx.AsyncClient(base_url=url, limits=no_limit, timeout=None) as client:
            service.permits = asyncio.Semaphore(0)
            video = (await client.post("/v1/videos", json={"prompt": "a", "num_inference_steps": 100})).json()
            async with watchers(client, video["id"], NUM_WATCHERS):
                one_more = await client.get(f"/v1/videos/{video['id']}/events")
                assert (one_more.status_code, one_more.json()["error"]["code"]) == (429, "too_many_watchers")
                assert int(one_more.headers["retry-after"]) > 0
                assert (await client.get("/health")).status_code == 200
                service.permits = None
                assert (await client.post(IMAGES, json={"prompt": "a"})).status_code == 200
            await client.delete(f"/v1/videos/{video['id']}")
    assert looks
    assert all(look == [video["id"]] for look in looks), "one look serves all watchers"


async def test_watchers_that_leave_make_room(service: FakeService, tmp_path: Path) -> None:
    with serving(build(service, tmp_path, max_watchers=1)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            service.permits = asyncio.Semaphore(0)
            video = (await client.post("/v1/videos", json={"prompt": "a"})).json()
            path = f"/v1/videos/{video['id']}/events"
            for _ in range(2):
                async with AsyncExitStack() as stack:
                    answer = await stack.enter_async_context(client.stream("GET", path))
                    while answer.status_code == 429:  # until the server has seen that the earlier watcher is gone
                        await answer.aread()
                        answer = await stack.enter_async_context(client.stream("GET", path))
                    assert answer.status_code == 200
                    assert (await client.get(path)).status_code == 429
            await client.delete(f"/v1/videos/{video['id']}")


@pytest.mark.parametrize("body", [{}, {"stream": True}], ids=["plain", "stream"])
async def test_a_burst_gets_its_refusals_while_others_work(
    service: FakeService, tmp_path: Path, body: dict[str, Any]
) -> None:
    service.permits = asyncio.Semaphore(0)
    async with client_of(build(service, tmp_path, max_open_pictures={"fake-pictures": 8})) as client:
        requests = [asyncio.create_task(client.post(IMAGES, json={"prompt": "a"} | body)) for _ in range(60)]
        await until(lambda: sum(request.done() for request in requests) == 52 and len(service.performed) == 8)
        refused = [request.result() for request in requests if request.done()]
        assert {answer.status_code for answer in refused} == {429}
        assert {answer.json()["error"]["code"] for answer in refused} == {"queue_full"}
        assert {int(answer.headers["retry-after"]) for answer in refused} == set(range(1, 9))
        for _ in range(8 * 4):
            service.permits.release()
        made = [answer for answer in await asyncio.gather(*requests) if answer.status_code == 200]
    assert len(made) == len(service.performed) == len(service.finished) == 8


@pytest.mark.parametrize(
    ("settings", "says_so"),
    [
        ({"max_open_pictures": {"fake-pictures": 2}}, True),
        ({"max_open_pictures": {"fake-pictures": 2, "other": 1}}, False),
        ({"max_open_pictures": {"fake-pictures": 2}, "is_only_replica": False}, False),
    ],
    ids=["full", "room for another model", "room in another replica"],
)
async def test_the_door_is_told_that_no_picture_has_a_place(
    service: FakeService, tmp_path: Path, settings: dict[str, Any], says_so: bool
) -> None:
    service.permits = asyncio.Semaphore(0)
    async with client_of(build(service, tmp_path, **settings)) as client:
        requests = [asyncio.create_task(client.post(IMAGES, json={"prompt": "a"}))]
        await until(lambda: len(service.performed) == 1)
        two = await client.post(IMAGES, json={"prompt": "a", "n": 2})
        assert (two.status_code, FULL_HEADER in two.headers) == (429, False), "there is room for one"
        requests.append(asyncio.create_task(client.post(IMAGES, json={"prompt": "a"})))
        await until(lambda: len(service.performed) == 2)
        one = await client.post(IMAGES, json={"prompt": "a"})
        assert (one.status_code, FULL_HEADER in one.headers) == (429, says_so)
        assert int(one.headers.get(FULL_HEADER, "2")) == 2, "seconds until both are finished"
        service.permits = None
        for request in requests:
            request.cancel()


async def test_pictures_that_end_make_room_however_they_end(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, max_open_pictures={"fake-pictures": 2})) as client:
        for _ in range(3):
            assert (await client.post(IMAGES, json={"prompt": "a", "n": 2})).status_code == 200
        service.permits = asyncio.Semaphore(0)
        for body in ({"n": 2}, {"n": 2, "stream": True}):
            service.performed.clear()
            request = asyncio.create_task(client.post(IMAGES, json={"prompt": "a"} | body))
            await until(lambda: len(service.performed) == 2)
            assert (await client.post(IMAGES, json={"prompt": "a"})).status_code == 429
            service.closed.clear()
            request.cancel()
            with suppress(asyncio.CancelledError):
                await request
            assert len(service.closed) == 2
        service.permits = None
        assert (await client.post(IMAGES, json={"prompt": "a", "n": 4})).status_code == 200, "alone it always fits"


async def test_a_full_server_says_so_and_is_healthy(service: FakeService, tmp_path: Path) -> None:
    service.permits = asyncio.Semaphore(0)
    async with client_of(build(service, tmp_path, max_open_requests=3)) as client:
        working = [asyncio.create_task(client.post(IMAGES, json={"prompt": "a"})) for _ in range(3)]
        await until(lambda: len(service.performed) == 3)
        answer = await client.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_full")
        assert int(answer.headers["retry-after"]) > 0
        assert (await client.get("/health")).status_code == 200
        for _ in range(12):
            service.permits.release()
        assert [answer.status_code for answer in await asyncio.gather(*working)] == [200] * 3
        assert (await client.get("/v1/models")).status_code == 200


def waits(places: Places, num: int, gang_in_s: float = 0.0) -> list[int]:
    """Return the seconds that ``num`` refused requests should wait."""
    told = []
    for _ in range(num):
        with pytest.raises(ApiError) as caught, places.taken(1, gang_in_s):
            pass
        told.append(int(caught.value.headers["Retry-After"]))
    return told


def test_the_time_to_wait_is_that_of_places_becoming_free() -> None:
    now_s = 0.0
    places = Places(3, clock=lambda: now_s)
    for _ in range(40):  # three at a time are running, and one ends every 5 s
        blocks = [places.taken(1) for _ in range(3)]
        for block in blocks:
            block.__enter__()
        for block in blocks:
            now_s += 5
            block.__exit__(None, None, None)
        now_s += 1000  # without requests, the time does not count as work
    blocks = [places.taken(1) for _ in range(3)]
    for block in blocks:
        block.__enter__()
    assert waits(places, 5) == [5, 10, 15, 15, 15], "the others ask first, and after three all are finished"
    now_s += 5
    blocks[0].__exit__(None, None, None)
    with places.taken(1):
        assert waits(places, 1) == [15]
        assert waits(places, 1, gang_in_s=30.2) == [15 + 31], "no place becomes free before there is a gang"


def test_places_are_what_the_gangs_take_and_a_little_more() -> None:
    def places(**denoiser: Any) -> int:
        return AppConfig.model_validate({"models": [{"name": "m", "denoiser": denoiser}]}).models[0].max_open_pictures

    assert places(max_running_jobs=4, max_waiting_jobs=32) == 36 + 9
    assert places(max_running_jobs=1, max_waiting_jobs=0) == 1 + 4
    assert places(max_running_jobs=4, max_waiting_jobs=32, autoscaling={"max_replicas": 3}) == 108 + 27


def test_serve_lets_more_in_than_are_worked_on() -> None:
    def api(**fields: Any) -> Any:
        return AppConfig.model_validate({"models": [{"name": "m"}], "api": fields}).api

    assert api().max_ongoing_requests > api().max_open_requests > api().max_watchers > NUM_WATCHERS
    with pytest.raises(ValueError, match="max_ongoing_requests is 256; it must be above max_open_requests"):
        api(max_ongoing_requests=256)


async def test_requests_wait_for_a_gang_that_is_rebuilt(client: httpx.AsyncClient, service: FakeService) -> None:
    service.reasons["fake-pictures"] = "no running replica"
    assert (await client.post(IMAGES, json={"prompt": "a"})).status_code == 503
    service.rebuilt = frozenset({"fake-pictures"})
    assert (await client.post(IMAGES, json={"prompt": "a"})).status_code == 200
    assert (await client.get("/health")).status_code == 503, "it reports the state"
