"""Requests that the official client and others send twice are made once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from deployments.database.database import Database
from deployments.http import idempotency
from deployments.http.idempotency import KnownRequests, Turn, fingerprint_of, name_of
from deployments.requests.bodies import ImageBody
from deployments.requests.rules import Requester
from engines.core.engine import JobFailedError
from pipelines.request import MediaRequest
from tests.deployments.http.conftest import build, client_of, serving
from tests.deployments.http.test_disconnect import until
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import FakeService
from tests.deployments.support.files import file_of, noise
from tests.support.patience import PATIENCE_S

IMAGES, EDITS, VIDEOS = "/v1/images/generations", "/v1/images/edits", "/v1/videos"
FILES = {"image": ("a.png", file_of(noise(32, 32)), "image/png")}
KEY = {"Idempotency-Key": "order-7"}


@pytest.fixture
def service() -> FakeService:
    return FakeService(takes_pictures=True)


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    """Return the body: a form, whose boundary changes each time, or JSON."""
    return {"data": fields, "files": FILES} if path == EDITS else {"json": fields}


@pytest.mark.parametrize("path", [IMAGES, EDITS])
async def test_pictures_are_drawn_once(client: httpx.AsyncClient, service: FakeService, path: str) -> None:
    """The seed is random: new pictures would differ."""
    first, again = [await client.post(path, **body_of(path, prompt="a"), headers=KEY) for _ in range(2)]
    assert first.status_code == 200, first.text
    assert (again.status_code, again.content, again.headers["idempotent-replayed"]) == (200, first.content, "true")
    assert (len(service.performed), "idempotent-replayed" in first.headers) == (1, False)
    error = error_of(await client.post(path, **body_of(path, prompt="b"), headers=KEY), 409)
    assert (error["code"], error["param"]) == ("idempotency_key_reused", "Idempotency-Key")
    assert (await client.post(path, **body_of(path, prompt="a"))).content != first.content
    assert (await client.post(path, **body_of(path, prompt="b"), headers={"Idempotency-Key": "8"})).status_code == 200


@pytest.mark.parametrize("path", [IMAGES, EDITS])
async def test_a_stream_is_drawn_once(client: httpx.AsyncClient, service: FakeService, path: str) -> None:
    asked = body_of(path, prompt="a", stream=True, n=2, partial_images=1)
    first, again = [await client.post(path, **asked, headers=KEY) for _ in range(2)]
    kind = "image_edit" if path == EDITS else "image_generation"
    names = [line for line in first.text.splitlines() if line.startswith("event: ")]
    assert {f"event: {kind}.partial_image", f"event: {kind}.completed"} <= {*names}
    last = [block for block in first.text.split("\n\n") if block.startswith(f"event: {kind}.completed")]
    assert [block for block in again.text.split("\n\n") if block] == last, "the same bytes, without previews"
    assert len(last) == 2
    assert again.headers["content-type"] == first.headers["content-type"]
    assert (len(service.performed), again.headers["idempotent-replayed"]) == (2, "true")
    assert error_of(await client.post(path, **body_of(path, prompt="b", stream=True), headers=KEY), 409)


async def test_of_two_streams_at_once_one_is_drawn(client: httpx.AsyncClient, service: FakeService) -> None:
    service.permits = asyncio.Semaphore(0)
    body = {"prompt": "a", "stream": True}
    both = [asyncio.create_task(client.post(IMAGES, json=body, headers=KEY)) for _ in range(2)]
    await until(lambda: len(service.performed) == 1)
    for _ in range(8):
        service.permits.release()
    first, second = await asyncio.gather(*both)
    assert second.text in first.text
    assert "image_generation.completed" in second.text
    assert len(service.performed) == 1


async def test_a_stream_that_fails_is_not_kept(client: httpx.AsyncClient, service: FakeService) -> None:
    body, failures = {"prompt": "a", "stream": True, "stream_progress": True}, [JobFailedError("no such luck")]

    def fail(request: MediaRequest, step: int) -> None:
        if step == 2 and failures:
            raise failures.pop()

    service.at_step = fail
    assert "job_failed" in (await client.post(IMAGES, json=body, headers=KEY)).text
    assert "image_generation.completed" in (await client.post(IMAGES, json=body, headers=KEY)).text


def test_a_stream_that_is_left_is_drawn_anew(service: FakeService, tmp_path: Path) -> None:
    body = {"prompt": "a", "stream": True, "stream_progress": True, "num_inference_steps": 50}
    with serving(build(service, tmp_path)) as url:
        with httpx.stream("POST", f"{url}{IMAGES}", json=body, headers=KEY) as answer:
            next(answer.iter_lines())
        again = httpx.post(f"{url}{IMAGES}", json=body, headers=KEY, timeout=PATIENCE_S)
    assert "image_generation.completed" in again.text
    assert (len(service.performed), len(service.closed)) == (2, 1)


def test_a_clip_of_the_official_client_is_made_once(service: FakeService, tmp_path: Path) -> None:
    """It holds by form and by JSON; a deleted clip may be made again."""
    with (
        serving(build(service, tmp_path)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        first, again = [client.videos.create(prompt="a", size="32x32", extra_headers=KEY) for _ in range(2)]  # type: ignore[arg-type]
        assert first.id == again.id
        assert httpx.post(f"{url}{VIDEOS}", json={"prompt": "a", "size": "32x32"}, headers=KEY).json()["id"] == first.id
        with pytest.raises(openai.ConflictError):
            client.videos.create(prompt="b", extra_headers=KEY)
        client.videos.delete(first.id)
        assert client.videos.create(prompt="a", size="32x32", extra_headers=KEY).id != first.id  # type: ignore[arg-type]


async def test_a_clip_that_is_awaited_is_made_once(client: httpx.AsyncClient, service: FakeService) -> None:
    first, again = [await client.post(f"{VIDEOS}/sync", json={"prompt": "a"}, headers=KEY) for _ in range(2)]
    assert (first.status_code, first.headers["x-troupe-video-id"]) == (200, again.headers["x-troupe-video-id"])
    assert len(service.performed) == 1


async def test_of_two_that_come_at_once_one_is_drawn(client: httpx.AsyncClient, service: FakeService) -> None:
    service.permits = asyncio.Semaphore(0)
    both = [asyncio.create_task(client.post(IMAGES, json={"prompt": "a"}, headers=KEY)) for _ in range(2)]
    await until(lambda: len(service.performed) == 1)
    for _ in range(8):
        service.permits.release()
    first, second = await asyncio.gather(*both)
    assert (first.status_code, first.content) == (200, second.content)
    assert len(service.performed) == 1


async def test_keys_are_those_of_an_api_key_and_a_path(service: FakeService, tmp_path: Path) -> None:
    async with client_of(build(service, tmp_path, api_keys=("alpha", "beta"))) as client:
        for key, prompt in (("alpha", "a"), ("beta", "b")):
            headers = {"Authorization": f"Bearer {key}"} | KEY
            assert (await client.post(IMAGES, json={"prompt": prompt}, headers=headers)).status_code == 200
            assert (await client.post(VIDEOS, json={"prompt": prompt}, headers=headers)).status_code == 200
    async with client_of(build(service, tmp_path, api_keys=("alpha",))) as client:
        headers = {"Authorization": "Bearer alpha"} | KEY
        again = await client.post(IMAGES, json={"prompt": "a"}, headers=headers)
        assert again.headers["idempotent-replayed"] == "true", "the key outlives a restart"


async def test_a_day_later_and_after_an_error_it_is_made_anew(
    client: httpx.AsyncClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await client.post(IMAGES, json={"prompt": "a", "seed": -5}, headers=KEY)).status_code == 400
    assert (await client.post(IMAGES, json={"prompt": "a"}, headers=KEY)).status_code == 200
    later_s = time.time() + 86401
    monkeypatch.setattr(idempotency, "time", SimpleNamespace(time=lambda: later_s))
    assert (await client.post(IMAGES, json={"prompt": "b"}, headers=KEY)).status_code == 200
    assert len(service.performed) == 2
    assert (await client.post(IMAGES, json={"prompt": "b"}, headers={"Idempotency-Key": "a" * 256})).status_code == 400


async def test_of_two_replicas_one_draws_and_the_other_waits(
    service: FakeService, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "LOOK_EVERY_S", 0.01)
    service.permits = asyncio.Semaphore(0)
    place: dict[str, Any] = {"clips": {"database_url": database_url}}
    async with client_of(build(service, tmp_path, **place)) as one, client_of(build(service, tmp_path, **place)) as two:
        both = [asyncio.create_task(client.post(IMAGES, json={"prompt": "a"}, headers=KEY)) for client in (one, two)]
        await until(lambda: len(service.performed) == 1)
        await asyncio.sleep(0.05)  # the other has looked
        for _ in range(8):
            service.permits.release()
        first, second = await asyncio.gather(*both)
        assert (first.status_code, second.status_code, first.content) == (200, 200, second.content)
        assert len(service.performed) == 1
        assert error_of(await two.post(IMAGES, json={"prompt": "b"}, headers=KEY), 409)


async def test_after_a_replica_that_died_over_a_request_another_makes_it(database_url: str) -> None:
    database, body, requester = Database(database_url), ImageBody(prompt="a"), Requester(request_id="r")
    await database.open()
    died, known = KnownRequests(database, lease_s=-1.0), KnownRequests(database)
    turn = await died._wait_for_turn(Turn(name=name_of("/x", requester, "k"), fingerprint=fingerprint_of(body)))
    async with known.turn("/x", requester, "k", body) as next_turn:
        assert next_turn.answer is None
        await died.keep(turn, b"of the dead")  # it was only slow: the holder of the turn counts
        await known.keep(next_turn, b"answer")
    async with known.turn("/x", requester, "k", body) as last:
        assert last.answer == b"answer"
    await database.close()


async def test_the_oldest_answers_make_room(database_url: str) -> None:
    database, body, requester = Database(database_url), ImageBody(prompt="a"), Requester(request_id="r")
    await database.open()
    known = KnownRequests(database, max_bytes=100)

    async def answers() -> list[bytes | None]:
        found = []
        for key in "abc":
            async with known.turn("/x", requester, key, body) as turn:
                found.append(turn.answer)
        return found

    for key in "abc":
        async with known.turn("/x", requester, key, body) as turn:
            await known.keep(turn, key.encode() * 40)
    assert await answers() == [None, b"b" * 40, b"c" * 40]
    await database.close()


async def test_without_the_database_only_requests_without_a_key_are_made(
    client: httpx.AsyncClient, service: FakeService, tmp_path: Path
) -> None:
    for file in tmp_path.glob("jobs.sqlite3*"):
        file.unlink()
    error = error_of(await client.post(IMAGES, json={"prompt": "a"}, headers=KEY), 503)
    assert error["code"] == "storage_unavailable"
    assert service.performed == []
    assert (await client.post(IMAGES, json={"prompt": "a"})).status_code == 200
