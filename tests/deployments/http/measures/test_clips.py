"""Clips have predicted ends and measured times, and a clip that would be late is refused, like a picture."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deployments.http.answers import Video
from deployments.http.clip_events import is_news
from engines.core.field_error import FieldError
from engines.gang.errors import QueueFullError, TooLateError
from pipelines.request import MediaRequest
from tests.deployments.http.conftest import Watch, build, client_of
from tests.deployments.http.routes.test_videos import finished, make, progress_of
from tests.deployments.http.support.events import sse
from tests.deployments.http.test_disconnect import until
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import DECODE_S, ETA_S, GPU_S, STEPS_S, FailingService, FakeService

CREATE, SYNC = "/v1/videos", "/v1/videos/sync"
LATE = TooLateError(3, 7.2, 16.2, "deadline_s", 9.0)
LONG_WAIT = TooLateError(3, 0.02, 16.2, "the longest wait, max_wait_s,", 9.0)
FULL = QueueFullError(3, 7.2)


@pytest.fixture
def still_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock for clips: predictions do not change during a test."""
    now_s = time.time()
    for module in ("attempt", "clips", "database", "store"):
        clock = SimpleNamespace(time=lambda: now_s, monotonic=time.monotonic)
        monkeypatch.setattr(f"deployments.clips.{module}.time", clock)


@pytest.mark.parametrize(
    ("path", "deadline_s", "failure", "code"),
    [
        (CREATE, 9, LATE, "too_late"),
        (CREATE, 9, LONG_WAIT, "too_late"),
        (CREATE, 9, FULL, "queue_full"),
        (SYNC, 9, LATE, "too_late"),
        (SYNC, None, LONG_WAIT, "too_late"),
        (SYNC, None, FULL, "queue_full"),
    ],
)
async def test_what_a_gang_does_not_take_is_refused_at_once(
    tmp_path: Path, path: str, deadline_s: float | None, failure: QueueFullError, code: str
) -> None:
    service = FailingService(failure)
    async with client_of(build(service, tmp_path)) as client:
        answer = await client.post(path, json={"prompt": "a", "deadline_s": deadline_s})
        error = error_of(answer, 429)
        assert (error["code"], error["type"]) == (code, "rate_limit_error")
        assert error["message"] == str(failure)
        assert answer.headers["Retry-After"] == ("1" if failure is LONG_WAIT else "8")
        assert "x-should-retry" not in answer.headers
        assert (await client.get(CREATE)).json()["data"] == []
        assert len(service.performed) == 1
    assert list((tmp_path / "videos").iterdir()) == []


async def test_a_deadline_that_could_never_be_met(tmp_path: Path) -> None:
    message = "deadline_s is 1, and the steps alone take 2 s"
    async with client_of(build(FailingService(FieldError(message, "deadline_s")), tmp_path)) as client:
        error = error_of(await client.post(CREATE, json={"prompt": "a", "deadline_s": 1}), 400)
        assert (error["message"], error["param"]) == (message, "deadline_s")


@pytest.mark.parametrize("failure", [LONG_WAIT, QueueFullError(3, 0.02)])
async def test_a_clip_without_a_deadline_waits_on_the_disk(tmp_path: Path, failure: QueueFullError) -> None:
    service = FailingService(failure, failure)
    async with client_of(build(service, tmp_path)) as client:
        clip = await finished(client, (await make(client))["id"])
        assert (clip["status"], len(service.performed)) == ("completed", 3)


async def test_a_clip_with_a_deadline_waits_for_no_place(tmp_path: Path) -> None:
    """An awaited clip does not wait either; queued clips go on in their own places."""
    service = FakeService(permits=asyncio.Semaphore(0))
    async with client_of(build(service, tmp_path, clips={"max_concurrent_videos": 1})) as client:
        first = await make(client, seed=1)
        await until(lambda: len(service.performed) == 1)
        await make(client, seed=2)
        urgent = await make(client, seed=3, deadline_s=60)
        assert urgent["status"] == "in_progress"
        awaited = asyncio.create_task(client.post(SYNC, json={"prompt": "a", "seed": 4}))
        await until(lambda: len(service.performed) == 3)
        assert [request.seed for request in service.performed] == [1, 3, 4]
        awaited.cancel()
        await client.delete(f"/v1/videos/{urgent['id']}")
        await asyncio.sleep(0.3)
        assert len(service.performed) == 3, "no place became free"
        await client.delete(f"/v1/videos/{first['id']}")
        await until(lambda: len(service.performed) == 4)


@pytest.mark.parametrize("path", [CREATE, SYNC])
async def test_a_clip_that_is_late_after_all(tmp_path: Path, path: str) -> None:
    """Its gang was lost, and the next one would finish it too late."""
    service, failures = FakeService(), [LATE, QueueFullError(1, 0.02)]

    def fail(request: MediaRequest, step: int) -> None:
        if len(failures) > 1:
            service.before = lambda request: (_ for _ in ()).throw(failures.pop())
            raise failures.pop()

    service.at_step = fail
    async with client_of(build(service, tmp_path)) as client:
        answer = await client.post(path, json={"prompt": "a", "deadline_s": 9})
        if path == SYNC:
            assert error_of(answer, 429)["code"] == "too_late"
            assert answer.headers["Retry-After"] == "8"
        else:
            clip = await finished(client, answer.json()["id"])
            assert (clip["status"], clip["error"]["code"]) == ("failed", "too_late")


async def test_who_leaves_before_his_clip_is_taken_leaves_none(tmp_path: Path) -> None:
    class Slow(FakeService):
        async def perform(self, *asked: Any) -> Any:
            self.performed.append(asked[0])
            await asyncio.Event().wait()
            yield

    service = Slow()
    async with client_of(build(service, tmp_path)) as client:
        coming = asyncio.create_task(client.post(CREATE, json={"prompt": "a", "deadline_s": 9}))
        await until(lambda: len(service.performed) == 1)
        coming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await coming
        assert (await client.get(CREATE)).json()["data"] == []


async def test_a_gang_says_when_its_clip_is_done(
    client: httpx.AsyncClient, service: FakeService, watch: Watch, still_time: None
) -> None:
    service.permits = asyncio.Semaphore(0)
    answer = await client.post(CREATE, json={"prompt": "a", "seed": 3, "deadline_s": 60, "num_inference_steps": 10})
    begun = answer.json()
    assert begun["eta_s"] == float(answer.headers["X-Troupe-Eta"]) == ETA_S + 3
    watching = await watch(client, begun["id"])
    service.permits.release()
    video = await progress_of(client, begun["id"], 10)
    assert video["eta_s"] == STEPS_S + DECODE_S
    for _ in range(9):
        service.permits.release()
    await finished(client, begun["id"])
    events = sse(await watching)
    assert events[0][1]["video"]["eta_s"] == ETA_S + 3
    assert events[-1][1]["video"]["eta_s"] is None


async def test_nothing_is_predicted_before_anything_was_measured(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    service.knows_times, service.permits = False, asyncio.Semaphore(1)
    answer = await client.post(CREATE, json={"prompt": "a", "deadline_s": 60})
    assert answer.json()["eta_s"] is None
    assert "X-Troupe-Eta" not in answer.headers
    assert (await progress_of(client, answer.json()["id"], 25))["eta_s"] is None


async def test_what_waits_on_the_disk_is_predicted_by_what_was_made(
    service: FakeService, tmp_path: Path, still_time: None
) -> None:
    async with client_of(build(service, tmp_path, clips={"max_concurrent_videos": 1})) as client:
        timings = (await finished(client, (await make(client))["id"]))["timings"]
        took_s = timings["total_s"] - timings["queue_s"]
        service.permits = asyncio.Semaphore(0)
        await make(client, seed=0)
        await until(lambda: len(service.performed) == 2)
        same = [await make(client) for _ in range(2)]
        other = await make(client, num_inference_steps=5)
        data = (await client.get(CREATE)).json()["data"]
        records = {one["id"]: one["eta_s"] for one in data}
        assert [one["num_before"] for one in data] == [2, 1, 0, None, None], "the newest first; two do not wait"
        for place, clip in enumerate(same, 1):
            assert records[clip["id"]] == pytest.approx(ETA_S + place * took_s, abs=0.01)
        assert records[other["id"]] is None
        answer = await client.get(f"/v1/videos/{same[1]['id']}")
        assert "X-Troupe-Eta" in answer.headers


async def test_what_a_clip_took_is_said_with_it(client: httpx.AsyncClient) -> None:
    clip = await finished(client, (await make(client))["id"])
    path = f"/v1/videos/{clip['id']}"
    for answer in (
        await client.get(path),
        await client.get(f"{path}/content"),
        await client.get(f"{path}/content", headers={"Range": "bytes=0-9"}),
        await client.head(f"{path}/content"),
        await client.get(f"{path}/content", params={"variant": "thumbnail"}),
    ):
        assert answer.headers["X-Troupe-Gpu-Seconds"] == f"{GPU_S:.3f}"


@pytest.mark.parametrize(
    ("told", "now", "passed_s", "expected"),
    [
        ({}, {}, 5.0, False),
        ({}, {"progress": 3}, 0.0, True),
        ({"eta_s": None}, {"eta_s": 9.0}, 1.0, True),
        ({"eta_s": 9.0}, {"eta_s": 4.0}, 5.0, False),
        ({"eta_s": 9.0}, {"eta_s": 9.0}, 5.0, True),
        ({"eta_s": 100.0}, {"eta_s": 86.0}, 5.0, False),
        ({"eta_s": 100.0}, {"eta_s": 80.0}, 5.0, True),
    ],
)
async def test_that_time_passes_is_no_news(
    client: httpx.AsyncClient, told: dict[str, Any], now: dict[str, Any], passed_s: float, expected: bool
) -> None:
    record = await make(client) | {"eta_s": None}
    assert is_news(Video(**record | now), Video(**record | told), passed_s) is expected
