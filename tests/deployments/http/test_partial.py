"""HEAD works wherever GET does, and files are not sent again to clients that have them."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
from pathlib import Path

import httpx
import pytest
from starlette.types import Message

from deployments.http.files import FileShelf
from deployments.http.partial import RangedFile
from deployments.observability.metrics import HTTP_REQUESTS
from engines.core.storage import write_atomically
from tests.deployments.http.conftest import build, serving
from tests.deployments.http.routes.test_images import IMAGES
from tests.deployments.http.routes.test_videos import finished, make
from tests.deployments.support.fake_service import FakeService
from tests.support.patience import PATIENCE_S

VARYING = {"x-request-id", "date", "server"}


async def paths_of(client: httpx.AsyncClient) -> list[str]:
    """Return one path for each GET in the document."""
    video = await finished(client, (await make(client))["id"])
    picture = (await client.post(IMAGES, json={"prompt": "a", "response_format": "url"})).json()["data"][0]["url"]
    line = {"custom_id": "a", "method": "POST", "url": IMAGES, "body": {"prompt": "a"}}
    lines = {"file": ("lines.jsonl", json.dumps(line).encode())}
    file = (await client.post("/v1/files", data={"purpose": "batch"}, files=lines)).json()
    wanted = {"input_file_id": file["id"], "endpoint": IMAGES, "completion_window": "24h"}
    batch = (await client.post("/v1/batches", json=wanted)).json()
    while (await client.get(f"/v1/batches/{batch['id']}")).json()["status"] != "completed":  # it grows until then
        await asyncio.sleep(0.02)
    names = {"video_id": video["id"], "model": "fake-clips", "name": picture.rsplit("/", 1)[1]}
    names |= {"file_id": file["id"], "batch_id": batch["id"], "lora_id": "lora_none"}
    documented = (await client.get("/openapi.json")).json()["paths"].items()
    return [path.replace(":path", "").format(**names) for path, methods in documented if "get" in methods]


async def test_head_has_the_headers_of_get(client: httpx.AsyncClient) -> None:
    paths = await paths_of(client)
    assert len(paths) == 15
    for path in (*paths, "/", "/docs", "/openapi.json", "/v1/videos/video_none", "/nothing"):
        head, got = await client.head(path), await client.get(path)
        assert (head.status_code, head.content) == (got.status_code, b""), path
        assert {*head.headers} - VARYING == {*got.headers} - VARYING, path
        if "content-length" in got.headers:
            assert head.headers["content-length"] == got.headers["content-length"]


@pytest.mark.parametrize(("version", "is_whole"), [("1.0", True), ("1.1", False)])
def test_clients_that_know_no_chunks_get_a_stream_as_a_whole(url: str, version: str, is_whole: bool) -> None:
    """``http.client`` reads it, which expects HTTP/1.1 whatever version it sent."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    head = f"POST {IMAGES} HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(PATIENCE_S)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, answer.chunked) == (200, not is_whole)
        assert (answer.length is not None) == is_whole
        events = answer.read()
    assert events.startswith(b"event: image_generation.")
    assert b"event: image_generation.completed" in events
    assert events.endswith(b"\n\n")


@pytest.mark.parametrize("what", ["replaced", "deleted"])
async def test_a_file_that_changes_as_it_is_sent(tmp_path: Path, what: str) -> None:
    path = tmp_path / "preview.png"
    path.write_bytes(b"old")
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)
        if message["type"] == "http.response.start":
            path.unlink() if what == "deleted" else write_atomically(path, b"new and longer")

    scope = {"type": "http", "method": "GET", "headers": [], "asgi": {"spec_version": "2.4"}}
    await RangedFile(path)(scope, None, send)  # type: ignore[arg-type]
    start, *bodies = messages
    assert dict(start["headers"])[b"content-length"] == b"3"
    assert b"".join(message["body"] for message in bodies) == b"old"


async def test_head_is_counted_by_its_route(client: httpx.AsyncClient) -> None:
    def num_counted(route: str) -> float:
        num: float = HTTP_REQUESTS.labels("HEAD", route, 200)._value.get()
        return num

    before = num_counted("/v1/models/{model:path}")
    await client.head("/v1/models/fake-clips")
    assert num_counted("/v1/models/{model:path}") == before + 1


async def test_head_of_what_only_takes_post_is_refused(client: httpx.AsyncClient) -> None:
    head = await client.head(IMAGES)
    assert (head.status_code, head.headers["allow"]) == (405, "POST")
    assert (await client.patch("/v1/videos")).headers["allow"] == "GET, HEAD, POST"


async def test_head_tells_of_the_whole_file_whatever_range_it_asks_for(client: httpx.AsyncClient) -> None:
    path = f"/v1/videos/{(await finished(client, (await make(client))['id']))['id']}/content"
    size = (await client.head(path)).headers["content-length"]
    for given in ("bytes=0-1", f"bytes={int(size) + 1}-"):
        head = await client.head(path, headers={"Range": given})
        assert (head.status_code, head.headers["content-length"]) == (200, size)
        assert "content-range" not in head.headers


def test_head_over_a_real_server_leaves_the_connection_usable(tmp_path: Path) -> None:
    with serving(build(FakeService(), tmp_path)) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        for _ in range(2):
            connection.request("HEAD", "/v1/models")
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"")
            assert int(answer.headers["content-length"]) > 100
        connection.close()


async def test_head_of_events_does_not_wait_for_the_clip(client: httpx.AsyncClient, service: FakeService) -> None:
    service.step_s = 1000
    video = await make(client)
    head = await client.head(f"/v1/videos/{video['id']}/events")
    assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert (await client.head("/v1/videos/video_none/events")).status_code == 404


@pytest.mark.parametrize("kind", [r"/v1/files/[^/]+\.png", "/v1/videos/.*/content"])
async def test_who_has_the_file_gets_it_no_more(client: httpx.AsyncClient, kind: str) -> None:
    path = next(path for path in await paths_of(client) if re.fullmatch(kind, path))
    whole = await client.get(path)
    etag, modified = whole.headers["etag"], whole.headers["last-modified"]
    same = ({"If-None-Match": etag}, {"If-None-Match": f'"x", W/{etag}'}, {"If-None-Match": "*"})
    for headers in (*same, {"If-Modified-Since": modified}, {"If-None-Match": etag, "Range": "bytes=0-9"}):
        for answer in (await client.get(path, headers=headers), await client.head(path, headers=headers)):
            assert (answer.status_code, answer.content) == (304, b""), headers
            assert answer.headers["etag"] == etag
            assert "content-length" not in answer.headers
    other = {"If-None-Match": '"x"', "If-Modified-Since": modified}  # the second counts only without the first
    for headers in (other, {"If-Modified-Since": "Mon, 01 Jan 2001 00:00:00 GMT"}, {"If-Modified-Since": "no date"}):
        answer = await client.get(path, headers=headers)
        assert (answer.status_code, answer.content) == (200, whole.content), headers


async def test_a_file_that_is_deleted_while_it_is_asked_for(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FileShelf, "find", lambda *_: tmp_path / "gone.png")
    answer = await client.get(f"/v1/files/{'0' * 32}.png")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_a_new_preview_has_a_new_tag(client: httpx.AsyncClient, tmp_path: Path) -> None:
    video = await finished(client, (await make(client))["id"])
    path = f"/v1/videos/{video['id']}/content?variant=preview"
    etag = (await client.get(path)).headers["etag"]
    (tmp_path / "videos" / video["id"] / "preview.png").write_bytes(b"a newer one")
    answer = await client.get(path, headers={"If-None-Match": etag})
    assert (answer.status_code, answer.content) == (200, b"a newer one")
