"""The API around a fake service: in process for raw HTTP, and behind a real server for clients."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message

from deployments.clips.clips import Clips
from deployments.clips.settings import ClipSettings
from deployments.http.app import create_api
from deployments.http.drain import _Answer
from deployments.http.settings import ApiSettings
from deployments.requests.prompt_enhancer import PromptEnhancers
from deployments.usage.api_keys import KeyRing
from tests.deployments.clips.support.runs import QUICK, with_tables
from tests.deployments.http.support.chromium import Chromium, chromium
from tests.deployments.http.support.late_fields import late_fields
from tests.deployments.support.fake_service import FakeService
from tests.support.patience import PATIENCE_S

Watch = Callable[[httpx.AsyncClient, str], Awaitable[asyncio.Task[httpx.Response]]]


def build(
    service: FakeService,
    data_dir: Path,
    *,
    clips: dict[str, Any] | None = None,
    api_keys: Iterable[str] = (),
    enhancers: PromptEnhancers | None = None,
    **settings: Any,
) -> FastAPI:
    clip_settings = ClipSettings(data_dir=with_tables(data_dir), **(QUICK | (clips or {})))
    quick: dict[str, Any] = {"video_poll_s": 0.02, "keys": KeyRing(api_keys)}
    api_settings = ApiSettings(data_dir=data_dir, **(quick | settings))
    with late_fields():
        return create_api(service, api_settings, Clips(service, clip_settings), enhancers=enhancers)


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


class Server(uvicorn.Server):
    """A server that ends at once on request: uvicorn's own checks every 0.1 s."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = threading.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # the headers of all answers
        await asyncio.to_thread(self._told.wait)

    def end(self) -> None:
        self.should_exit = True
        self._told.set()


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Yield the URL of a real server for ``app``, on a free port, in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.end()
        thread.join(PATIENCE_S)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def api(service: FakeService, tmp_path: Path) -> FastAPI:
    return build(service, tmp_path)


@pytest.fixture
async def client(api: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(api) as client:
        yield client


@pytest.fixture
def first_bytes(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event that is set once part of an answer was sent."""
    sent, send = asyncio.Event(), _Answer.send

    async def noted(answer: _Answer, message: Message) -> None:
        await send(answer, message)
        if message["type"] == "http.response.body":
            sent.set()

    monkeypatch.setattr(_Answer, "send", noted)
    return sent


@pytest.fixture
def watch(first_bytes: asyncio.Event) -> Watch:
    """Return a function that starts to read a clip's events, and returns the answer's task after the first."""

    async def begin(client: httpx.AsyncClient, video_id: str) -> asyncio.Task[httpx.Response]:
        first_bytes.clear()
        watching = asyncio.create_task(client.get(f"/v1/videos/{video_id}/events"))
        async with asyncio.timeout(PATIENCE_S):
            await first_bytes.wait()
        return watching

    return begin


@pytest.fixture
def url(api: FastAPI) -> Iterator[str]:
    with serving(api) as url:
        yield url


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser
