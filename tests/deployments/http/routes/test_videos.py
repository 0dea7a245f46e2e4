"""Clips over raw HTTP have forms, progress, ranges, previews and deletion."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.requests.size_choice import clip_length
from engines.gang.errors import GangBrokenError
from pipelines.request import MediaRequest
from tests.deployments.clips.test_webhooks import LOCAL, SECRET, Receiver, listening
from tests.deployments.http.conftest import Watch, build, client_of
from tests.deployments.http.support.events import sse
from tests.deployments.http.test_disconnect import until
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import CLIPS, FakeService


async def look(client: httpx.AsyncClient, video_id: str) -> dict[str, Any]:
    answer = await client.get(f"/v1/videos/{video_id}")
    assert answer.status_code == 200, answer.text
    video: dict[str, Any] = answer.json()
    return video


async def finished(client: httpx.AsyncClient, video_id: str) -> dict[str, Any]:
    while (video := await look(client, video_id))["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.02)
    return video


async def make(client: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    answer = await client.post("/v1/videos", json={"prompt": "a"} | fields)
    assert answer.status_code == 200, answer.text
    video: dict[str, Any] = answer.json()
    return video


async def test_form_and_json_ask_for_the_same(client: httpx.AsyncClient, service: FakeService) -> None:
    fields = {"prompt": "ä b", "seconds": "2", "seed": 3, "num_inference_steps": 2, "true_cfg_scale": 2.5, "fps": 8}
    form = {name: (None, str(value)) for name, value in fields.items()}
    by_form = (await client.post("/v1/videos", files=form)).json()
    by_json = await make(client, **fields)
    for video in (by_form, by_json):
        assert (await finished(client, video["id"]))["status"] == "completed"
    asked = [
        (r.prompt, r.seed, r.num_frames, r.fps, r.true_cfg_scale, r.num_inference_steps) for r in service.performed
    ]
    assert asked == [("ä b", 3, 17, 8, 2.5, 2)] * 2
    contents = [(await client.get(f"/v1/videos/{video['id']}/content")).content for video in (by_form, by_json)]
    assert contents[0] == contents[1]


async def progress_of(client: httpx.AsyncClient, video_id: str, expected: int) -> dict[str, Any]:
    while (video := await look(client, video_id))["progress"] != expected:
        assert video["progress"] < expected, video
        assert video["error"] is None, video
        await asyncio.sleep(0.02)
    return video


async def test_progress_is_that_of_the_steps(client: httpx.AsyncClient, service: FakeService) -> None:
    service.permits = asyncio.Semaphore(0)
    video = await make(client, num_inference_steps=10)
    assert (video["status"], video["progress"], video["completed_at"]) == ("queued", 0, None)
    for expected in (10, 20, 30, 40, 50, 60, 70, 80, 90, 100):
        service.permits.release()
        video = await progress_of(client, video["id"], expected)
        assert video["status"] == ("completed" if expected == 100 else "in_progress")
    assert (video["num_previews"], video["error"]) == (3, None)
    assert video["completed_at"] >= video["created_at"]


async def test_events_tell_the_whole_way(client: httpx.AsyncClient, service: FakeService, watch: Watch) -> None:
    service.permits = asyncio.Semaphore(0)
    video = await make(client, num_inference_steps=8)
    watching = await watch(client, video["id"])
    for expected in (12, 25, 37, 50, 62, 75, 87, 100):
        service.permits.release()
        await progress_of(client, video["id"], expected)
    events = sse(await watching)
    assert [name for name, _ in events[:-1]] == ["video.progress"] * (len(events) - 1)
    told = [event["video"]["progress"] for _, event in events]
    assert told == sorted(told)
    assert told[0] == 0
    assert (events[-1][0], told[-1]) == ("video.completed", 100)
    again = sse(await client.get(f"/v1/videos/{video['id']}/events"))
    assert [name for name, _ in again] == ["video.completed"]


async def test_ranges(client: httpx.AsyncClient) -> None:
    video = await make(client)
    await finished(client, video["id"])
    path = f"/v1/videos/{video['id']}/content"
    whole = await client.get(path)
    assert (whole.status_code, whole.headers["content-type"]) == (200, "video/mp4")
    assert whole.headers["accept-ranges"] == "bytes"
    size = len(whole.content)
    for given, start, end in (("0-9", 0, 10), ("10-", 10, size), ("-5", size - 5, size), ("0-999999999", 0, size)):
        part = await client.get(path, headers={"Range": f"bytes={given}"})
        assert part.status_code == 206
        assert part.content == whole.content[start:end]
        assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
    for nonsense in ("bytes=9-1", "bytes=-", "lines=1-2", "bytes=a-b", "bytes", "bytes=0-1,4-5"):
        assert (await client.get(path, headers={"Range": nonsense})).content == whole.content
    for beyond in (f"bytes={size}-", "bytes=-0"):
        answer = await client.get(path, headers={"Range": beyond})
        assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{size}")
        assert answer.json()["error"]["code"] == "range_not_satisfiable"


async def test_variants(client: httpx.AsyncClient, service: FakeService) -> None:
    service.permits = asyncio.Semaphore(0)
    video = await make(client, num_inference_steps=8)
    path = f"/v1/videos/{video['id']}/content"
    early = await client.get(path)
    assert (early.status_code, early.json()["error"]["code"]) == (409, "video_not_ready")
    for _ in range(8):
        service.permits.release()
    while (preview := await client.get(path, params={"variant": "preview"})).status_code == 409:
        await asyncio.sleep(0.02)
    assert preview.content.startswith(b"\x89PNG")
    await finished(client, video["id"])
    thumbnail = await client.get(path, params={"variant": "thumbnail"})
    assert (thumbnail.headers["content-type"], thumbnail.content[8:12]) == ("image/webp", b"WEBP")
    unknown = await client.get(path, params={"variant": "spritesheet"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "variant")


async def test_delete_stops_the_clip(
    client: httpx.AsyncClient, service: FakeService, tmp_path: Path, watch: Watch
) -> None:
    service.permits = asyncio.Semaphore(40)
    video = await make(client, num_inference_steps=100)
    watching = await watch(client, video["id"])
    while (await client.get(f"/v1/videos/{video['id']}/content?variant=preview")).status_code != 200:
        await asyncio.sleep(0.02)
    answer = await client.delete(f"/v1/videos/{video['id']}")
    assert answer.json() == {"id": video["id"], "object": "video.deleted", "deleted": True}
    assert len(service.closed) == 1  # at once, not with the next report
    assert not (tmp_path / "videos" / video["id"]).exists()
    assert sse(await watching)[-1][0] == "video.deleted"
    for method in ("GET", "DELETE"):
        assert (await client.request(method, f"/v1/videos/{video['id']}")).status_code == 404
    service.permits = None
    assert (await finished(client, (await make(client))["id"]))["status"] == "completed"


async def test_failed_clip(client: httpx.AsyncClient, service: FakeService) -> None:
    def fail(request: MediaRequest) -> None:
        raise GangBrokenError("rank 1 died")

    service.before = fail
    video = await finished(client, (await make(client))["id"])
    assert video["status"] == "failed"
    assert video["error"]["code"] == "gang_broken"
    assert "rank 1 died" in video["error"]["message"]
    answer = await client.get(f"/v1/videos/{video['id']}/content")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "video_failed")
    assert sse(await client.get(f"/v1/videos/{video['id']}/events"))[-1][0] == "video.failed"


async def test_full_queue(service: FakeService, tmp_path: Path) -> None:
    service.step_s = 1000
    limits = {"max_concurrent_videos": 1, "max_waiting_videos": 1}
    async with client_of(build(service, tmp_path, clips=limits)) as client:
        await make(client)
        await until(lambda: len(service.performed) == 1)
        await make(client)
        answer = await client.post("/v1/videos", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None, None), (17, 8)),
        ((None, 9, 4), (9, 4)),
        ((1.0, None, None), (9, 8)),
        ((2, None, 4), (9, 4)),
        ((0.1, None, None), (1, 8)),
        ((6.1, None, None), (49, 8)),
    ],
)
def test_clip_length(given: tuple[float | None, int | None, int | None], expected: tuple[int, int]) -> None:
    assert clip_length(*given, CLIPS) == expected


async def test_a_file_that_is_gone(client: httpx.AsyncClient, tmp_path: Path) -> None:
    video = await make(client)
    await finished(client, video["id"])
    path = f"/v1/videos/{video['id']}/content"
    (tmp_path / "videos" / video["id"] / "thumbnail.webp").unlink()
    answer = await client.get(path, params={"variant": "thumbnail"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "video_gone")
    assert (await client.get(path)).status_code == 200, "the clip itself is there"
    (tmp_path / "videos" / video["id"] / "clip.mp4").unlink()
    for _ in range(2):
        answer = await client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "video_gone")
        assert "make it again with the same seed" in answer.json()["error"]["message"]
    record = (await client.get(f"/v1/videos/{video['id']}")).json()
    assert (record["status"], record["error"]["code"]) == ("failed", "file_gone")


async def test_a_full_disk(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    video = await make(client)
    await finished(client, video["id"])
    assert (await client.get("/health")).json()["storage"] == "ok"
    monkeypatch.setattr("deployments.clips.storage.MIN_FREE_BYTES", 1 << 62)
    answer = await client.post("/v1/videos", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
    assert "delete clips, or make room" in answer.json()["error"]["message"]
    health = await client.get("/health")
    assert "delete clips, or make room" in health.json()["storage"]
    assert health.status_code == 200, "pictures can be drawn"
    assert (await client.delete(f"/v1/videos/{video['id']}")).status_code == 200


async def test_a_picture_without_room(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(*_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("deployments.http.files.FileShelf.put", put)
    answer = await client.post("/v1/images/generations", json={"prompt": "a", "response_format": "url"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")


async def test_a_database_that_is_gone(client: httpx.AsyncClient, tmp_path: Path) -> None:
    video = await make(client)
    await finished(client, video["id"])
    for file in tmp_path.glob("jobs.sqlite3*"):
        file.unlink()
    for method, path in (("GET", f"/v1/videos/{video['id']}"), ("GET", "/v1/videos"), ("POST", "/v1/videos")):
        answer = await client.request(method, path, json={"prompt": "a"} if method == "POST" else None)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable")
        assert "restart it" in answer.json()["error"]["message"]


async def test_a_webhook_hears_of_the_end(tmp_path: Path) -> None:
    receiver = Receiver(200)
    async with (
        listening(receiver) as webhook,
        client_of(build(FakeService(), tmp_path, clips={"webhooks": LOCAL})) as client,
    ):
        asked = {"url": webhook.url, "secret": webhook.secret}
        by_json = await client.post("/v1/videos", json={"prompt": "a", "webhook": asked})
        by_form = await client.post("/v1/videos", data={"prompt": "a", "webhook": json.dumps(asked)})
        await receiver.has_heard(2)
    assert {event["data"]["id"] for event in receiver.events} == {by_json.json()["id"], by_form.json()["id"]}
    assert webhook.secret not in by_json.text


@pytest.mark.parametrize(
    ("webhook", "message"),
    [
        ({"url": "https://example.com/x", "secret": SECRET}, "webhook cannot be used: url is 'https://example.com/x'"),
        ({"url": "http://localhost/x", "secret": "word"}, "webhook cannot be used: secret must be whsec_"),
        ({"url": "http://localhost/x"}, "secret"),
        ("http://localhost/x", "webhook"),
    ],
)
async def test_webhooks_that_are_refused(tmp_path: Path, webhook: object, message: str) -> None:
    service = FakeService()
    async with client_of(build(service, tmp_path, clips={"webhooks": LOCAL})) as client:
        error = error_of(await client.post("/v1/videos", json={"prompt": "a", "webhook": webhook}), 400)
    assert message in error["message"]
    assert error["param"].startswith("webhook")
    assert service.performed == []
