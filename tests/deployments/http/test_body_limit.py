"""Bodies have limits of size and speed, and some are not read at all."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployments.http.conftest import build, client_of, serving
from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import FakeService
from tests.support.patience import PATIENCE_S

IMAGES = "/v1/images/generations"
GIB = 1 << 30
BODY = {"prompt": "a"}


@pytest.fixture(autouse=True)
def short_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time after an answer in which the client may send the rest or leave."""
    monkeypatch.setattr("deployments.http.body_limit.DRAIN_S", 0.05)


@asynccontextmanager
async def connection(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(PATIENCE_S):
        yield reader, writer
    writer.close()


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", "")).encode()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of an answer with a length."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/v1/models", 200),
        ("DELETE", f"/v1/videos/video_{'0' * 32}", 404),
        ("POST", "/v1/nothing", 404),
        ("PUT", "/v1/videos", 405),
        ("POST", "/health", 405),
        ("POST", IMAGES, 413),
    ],
)
async def test_a_gibibyte_that_nobody_wants_is_not_read(url: str, method: str, path: str, status: int) -> None:
    async with connection(url) as (reader, writer):
        writer.write(head(method, path, "Content-Type: application/json", f"Content-Length: {GIB}"))
        writer.write(b"x" * 1000)  # no more than that: the answer does not wait for it
        code, headers, body = await answer_of(reader)
        assert (code, headers["connection"]) == (status, "close")
        assert json.loads(body)
        assert await reader.read() == b"", "the server closes the connection"


async def test_a_small_body_where_none_belongs_does_no_harm(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        for path in ("/health", "/v1/models", "/v1/videos"):
            assert (await client.request("GET", path, json={})).status_code == 200


async def test_a_body_that_comes_too_slowly_is_refused(service: FakeService, tmp_path: Path) -> None:
    with serving(build(service, tmp_path, body_deadline_s=0.2)) as url:
        for path, kind in ((IMAGES, "application/json"), ("/v1/videos", "multipart/form-data; boundary=x")):
            async with connection(url) as (reader, writer):
                writer.write(head("POST", path, f"Content-Type: {kind}", "Content-Length: 100") + b"--x\r\n")
                code, headers, body = await answer_of(reader)
                assert (code, headers["connection"]) == (408, "close")
                assert json.loads(body)["error"]["code"] == "body_timeout"
        async with connection(url) as (reader, writer):
            service.permits, sent = asyncio.Semaphore(0), json.dumps(BODY).encode()
            lines = ("Content-Type: application/json", f"Content-Length: {len(sent)}")
            writer.write(head("POST", IMAGES, *lines) + sent)  # at once: this process may be paused between two pieces
            drawing = asyncio.create_task(answer_of(reader))
            done, _ = await asyncio.wait((drawing,), timeout=0.5)
            assert not done, "the deadline is that of the body, not of the picture"
            for _ in range(4):
                service.permits.release()
            assert (await drawing)[0] == 200


async def test_an_endless_body_keeps_no_stream_of_events_open(url: str, service: FakeService) -> None:
    service.permits = asyncio.Semaphore(0)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client, connection(url) as (reader, writer):
        video = (await client.post("/v1/videos", json={"prompt": "a"})).json()
        writer.write(head("GET", f"/v1/videos/{video['id']}/events", "Transfer-Encoding: chunked"))
        await reader.readuntil(b"event: video.progress")
        writer.write(b"20000\r\n" + b"x" * 0x20000 + b"\r\n")
        with suppress(ConnectionResetError):
            await reader.read()  # returns when the server has closed the connection
        await client.delete(f"/v1/videos/{video['id']}")


@pytest.mark.parametrize(
    ("sent", "code", "message"),
    [
        ({"content": json.dumps(BODY)}, "unsupported_content_type", "Content-Type is missing; allowed: application/js"),
        (
            {"content": json.dumps(BODY), "headers": {"Content-Type": "text/plain"}},
            "unsupported_content_type",
            "Content-Type is 'text/plain'; allowed: application/json",
        ),
        (
            {
                "content": gzip.compress(json.dumps(BODY).encode()),
                "headers": {"Content-Type": "application/json", "Content-Encoding": "gzip"},
            },
            "unsupported_content_encoding",
            "Content-Encoding is 'gzip'; send the body as it is",
        ),
    ],
    ids=["no type", "text", "gzip"],
)
@pytest.mark.parametrize("path", [IMAGES, "/v1/videos"])
async def test_a_body_says_what_it_is(
    client: httpx.AsyncClient, service: FakeService, path: str, sent: dict[str, Any], code: str, message: str
) -> None:
    error = error_of(await client.post(path, **sent), 415)
    assert error["code"] == code
    assert message in error["message"]
    assert service.performed == []


async def test_a_type_may_say_more(client: httpx.AsyncClient) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8", "Content-Encoding": "identity"}
    assert (await client.post(IMAGES, content=json.dumps(BODY), headers=headers)).status_code == 200


@pytest.mark.parametrize("path", [IMAGES, "/v1/videos"])
async def test_a_long_name_of_a_field_is_not_sent_back(client: httpx.AsyncClient, path: str) -> None:
    name = "x" * 900_000
    answer = await client.post(path, json=BODY | {name: 1})
    error = error_of(answer, 400)
    assert (error["code"], error["param"]) == ("unknown_field", f"{name[:77]}...")
    assert len(answer.content) < 2000


async def test_an_empty_request_id_gets_one_of_ours(service: FakeService, tmp_path: Path) -> None:
    for sends_request_id in (True, False):
        async with client_of(build(service, tmp_path, sends_request_id=sends_request_id)) as client:
            answer = await client.get("/health", headers={"X-Request-Id": ""})
            assert answer.headers["x-request-id"].startswith("req_")
