"""The door, through Ray Serve's proxy, admits many watchers of one clip, and refuses large bodies and wrong names."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import httpx
import openai
import pytest

from tests.deployments.support.files import file_of, noise
from tests.deployments.support.live import PROMPT, TIMEOUT_S, streamed
from tests.end_to_end.conftest import LONG_CLIP

NUM_CLIPS = 10
"""Two of these are made at a time: the last one waits for as long as watchers take to come."""
NUM_WATCHERS = 300
"""More than 256, the former limit of a replica for all requests together."""


async def test_idle_watchers_take_no_place_from_work(url: str) -> None:
    no_limit = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=no_limit) as client, AsyncExitStack() as stack:
        body = {"prompt": PROMPT, **LONG_CLIP}
        ids = [(await client.post("/v1/videos", json=body)).json()["id"] for _ in range(NUM_CLIPS)]

        async def watch() -> AsyncIterator[str]:
            answer = await stack.enter_async_context(client.stream("GET", f"/v1/videos/{ids[-1]}/events"))
            lines = answer.aiter_lines()
            assert await anext(lines) in ("event: video.progress", ": nothing new")
            return lines  # a stream whose iterator is dropped is closed

        watching = await asyncio.gather(*(watch() for _ in range(NUM_WATCHERS)))
        assert len(watching) == NUM_WATCHERS
        assert (await client.get("/health")).status_code == 200
        assert await streamed(client, seed=1, num_inference_steps=2)
        for clip_id in reversed(ids):
            assert (await client.delete(f"/v1/videos/{clip_id}")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/health", 413), ("POST", "/v1/nothing", 404), ("PUT", "/v1/videos", 405)]
)
def test_a_gibibyte_that_nobody_wants_is_not_read(url: str, method: str, path: str, status: int) -> None:
    """It is sent slowly: a proxy that reads as fast as it can is between this client and the closing server."""
    host, _, port = url.removeprefix("http://").partition(":")
    num_bytes = 0
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {1 << 30}\r\n\r\n".encode())
        assert connection.recv(1000).startswith(f"HTTP/1.1 {status} ".encode()), "the answer does not wait for the body"
        with suppress(ConnectionError):
            while num_bytes < 1 << 30:
                num_bytes += connection.send(b"x" * 65536)
                time.sleep(0.001)
    assert num_bytes < 1 << 30, "the connection was closed"


def test_the_server_knows_its_names(url: str) -> None:
    for host, status in (("localhost", 200), (socket.gethostname(), 200), ("[::1]", 200), ("evil.example", 403)):
        answer = httpx.get(f"{url}/health", headers={"Host": host}, timeout=TIMEOUT_S)
        assert answer.status_code == status, host


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_pictures_that_are_not_taken(official: openai.OpenAI) -> None:
    small, large = file_of(noise(32, 32)), file_of(noise(512, 512))
    with pytest.raises(openai.BadRequestError, match="this model takes none"):
        official.videos.create(input_reference=small, prompt=PROMPT)
    with pytest.raises(openai.APIStatusError, match="The body is larger than") as caught:
        official.videos.create(input_reference=large, prompt=PROMPT)
    assert caught.value.status_code == 413
