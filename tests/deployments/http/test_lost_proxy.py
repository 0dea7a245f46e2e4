"""If a proxy dies under a request, the client counts as gone, and the log has one line."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from starlette.types import Message

from tests.deployments.http.conftest import build
from tests.deployments.http.test_disconnect import until
from tests.deployments.support.fake_service import FakeService

IMAGES = "/v1/images/generations"


class DyingProxy:
    """Delivers ``messages``, then hangs until ``dies`` is set. ``answer`` has the messages it received."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.dies = asyncio.Event()
        self.answer: list[Message] = []

    async def receive(self) -> Message:
        if self.messages:
            return self.messages.pop(0)
        await self.dies.wait()
        self.dies.clear()  # a second call hangs, as with Ray Serve's own
        raise ActorDiedError

    async def send(self, message: Message) -> None:
        self.answer.append(message)


def scope() -> dict[str, Any]:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"100"), (b"host", b"localhost")]
    return {"type": "http", "method": "POST", "path": IMAGES, "query_string": b"", "headers": headers}


def body(**fields: Any) -> Message:
    text = json.dumps({"prompt": "a"} | fields).ljust(100).encode()
    return {"type": "http.request", "body": text, "more_body": False}


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream": True}], ids=["picture", "pictures", "stream"])
async def test_its_pictures_are_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    service, proxy = FakeService(permits=asyncio.Semaphore(0)), DyingProxy(body(**fields))
    app = build(service, tmp_path, first_event_wait_s=60.0)
    with caplog.at_level(logging.INFO, "troupe"):
        request = asyncio.create_task(app(scope(), proxy.receive, proxy.send))
        await until(lambda: len(service.performed) == fields.get("n", 1))
        proxy.dies.set()
        await request
    assert len(service.closed) == len(service.performed)
    assert [record.getMessage() for record in caplog.records] == [f"POST {IMAGES} 499"]


async def test_a_stream_that_has_begun_is_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService(permits=asyncio.Semaphore(1))
    proxy = DyingProxy(body(stream=True, stream_progress=True))
    with caplog.at_level(logging.INFO, "troupe"):
        request = asyncio.create_task(build(service, tmp_path)(scope(), proxy.receive, proxy.send))
        await until(lambda: len(proxy.answer) >= 2)
        proxy.dies.set()
        await request
    assert len(service.closed) == 1
    assert [record.getMessage() for record in caplog.records] == [f"POST {IMAGES} 200"]


async def test_a_body_that_breaks_off_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService()
    proxy = DyingProxy({"type": "http.request", "body": b"{", "more_body": True})
    proxy.dies.set()
    with caplog.at_level(logging.INFO, "troupe"):
        await build(service, tmp_path)(scope(), proxy.receive, proxy.send)
    assert [record.getMessage() for record in caplog.records] == [f"POST {IMAGES} 499"]
    assert proxy.answer == []
