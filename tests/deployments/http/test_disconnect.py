"""The job of a client that disconnects is cancelled, whatever the client waited for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message

from deployments.asyncio_tools import Upcoming
from deployments.http.settings import ApiSettings
from deployments.http.streams import Event, EventStream, start_stream
from tests.deployments.http.conftest import build, serving
from tests.deployments.support.fake_service import FakeService
from tests.support.patience import PATIENCE_S

IMAGES = "/v1/images/generations"


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("body", [{}, {"n": 3}, {"stream": True}, {"stream": True, "stream_progress": True, "n": 2}])
async def test_client_that_hangs_up(url: str, service: FakeService, body: dict[str, Any]) -> None:
    service.permits, num_jobs = asyncio.Semaphore(body.get("n", 1)), body.get("n", 1)  # one step of each, and no more
    payload = json.dumps({"prompt": "a", "num_inference_steps": 100} | body).encode()
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    headers = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(payload)}")
    head = "\r\n".join((f"POST {IMAGES} HTTP/1.1", *headers, "", ""))
    writer.write(head.encode() + payload)
    await until(lambda: len(service.performed) == num_jobs)
    if "stream_progress" in body:
        await reader.readuntil(b"troupe.progress")
    assert service.closed == []
    writer.close()
    await until(lambda: len(service.closed) == num_jobs)
    assert service.finished == []
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        service.permits = None
        assert (await client.post(url + IMAGES, json={"prompt": "b"})).status_code == 200


async def test_cancelled_handler(api: FastAPI, service: FakeService) -> None:
    """Ray Serve cancels the handler's task instead of sending http.disconnect."""
    service.step_s = 1000
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://localhost") as client:
        for body in ({}, {"stream": True}):
            request = asyncio.create_task(client.post(IMAGES, json={"prompt": "a", "n": 2} | body))
            await until(lambda: len(service.performed) == 2)
            request.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await request
            assert len(service.closed) == 2
            service.performed.clear()
            service.closed.clear()


async def test_keepalive_while_the_job_waits(tmp_path: Path) -> None:
    service = FakeService(step_s=0.2)
    with serving(build(service, tmp_path, first_event_wait_s=0.05, keepalive_s=0.05)) as url:
        body = {"prompt": "a", "stream": True, "num_inference_steps": 100}
        async with httpx.AsyncClient(timeout=None) as client, client.stream("POST", url + IMAGES, json=body) as answer:
            lines = []
            async for line in answer.aiter_lines():
                lines.append(line)
                if lines.count(": nothing new") == 3:
                    service.step_s = 0
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert lines.count(": nothing new") >= 3
    assert lines.index(": nothing new") < lines.index("event: image_generation.completed")


async def test_a_client_that_is_gone_before_the_first_byte() -> None:
    """Its work is closed, though the response never reached its chunks."""
    is_closed = False

    async def endless() -> AsyncGenerator[Event]:
        nonlocal is_closed
        try:
            while True:
                yield Event(type="a")
        finally:
            is_closed = True

    async def fail(message: Message) -> None:
        raise ConnectionResetError

    events = endless()
    response = EventStream(await anext(events), Upcoming(events), keepalive_s=1.0)
    with pytest.raises(ConnectionResetError):
        await response.stream_response(fail)
    assert is_closed


class Endless:
    """Endless events; records whether the first has begun, and whether all have ended."""

    has_begun = is_closed = False

    async def events(self) -> AsyncGenerator[Event]:
        self.has_begun = True
        try:
            while True:
                await asyncio.sleep(0)
                yield Event(type="a")
        finally:
            self.is_closed = True


async def test_a_stream_that_is_cancelled_at_whatever_moment_is_over_with_its_request(tmp_path: Path) -> None:
    """A stopping server does this. Each time the loop turns once more, from before the first event to after it."""
    settings, num_begun = ApiSettings(data_dir=tmp_path), 0

    async def receive() -> Message:
        never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await never

    async def send(message: Message) -> None:
        await asyncio.sleep(0)

    async def answer(events: AsyncGenerator[Event]) -> None:
        await (await start_stream(events, receive, settings))({"type": "http"}, receive, send)

    for num_turns in range(40):
        source = Endless()
        events = source.events()  # this reference keeps it from garbage collection
        request = asyncio.create_task(answer(events))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
        assert source.is_closed == source.has_begun, f"{num_turns} turns"
        num_begun += source.has_begun
    assert num_begun > 30
