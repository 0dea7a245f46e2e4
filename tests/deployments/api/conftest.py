"""The API around a fake studio: in process for raw HTTP, and behind a real server for clients."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from deployments.api.app import create_api
from deployments.api.settings import ApiSettings
from deployments.clips.clips import Clips
from deployments.clips.settings import ClipSettings
from deployments.keys import KeyRing
from tests.deployments.support.fake_studio import FakeStudio
from tests.support.patience import PATIENCE_S


def build(
    studio: FakeStudio,
    data_dir: Path,
    *,
    clips: dict[str, Any] | None = None,
    api_keys: Iterable[str] = (),
    **settings: Any,
) -> FastAPI:
    clip_settings = ClipSettings(data_dir=data_dir, **({"progress_s": 0.02, "poll_s": 0.1} | (clips or {})))
    api_settings = ApiSettings(data_dir=data_dir, **({"video_poll_s": 0.02, "keys": KeyRing(api_keys)} | settings))
    return create_api(studio, api_settings, Clips(studio, clip_settings))


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The URL of a real server for ``app``, on a port that was free, in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture
def studio() -> FakeStudio:
    return FakeStudio()


@pytest.fixture
def api(studio: FakeStudio, tmp_path: Path) -> FastAPI:
    return build(studio, tmp_path)


@pytest.fixture
async def client(api: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(api) as client:
        yield client


@pytest.fixture
def url(api: FastAPI) -> Iterator[str]:
    with serving(api) as url:
        yield url
