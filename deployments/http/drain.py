"""Shutdown of a server: no new requests, time for running ones to finish, and a last event for those that are cut."""

from __future__ import annotations

import asyncio
import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.asyncio_tools import EndedError, cancel, unless
from deployments.http.admission import ALWAYS_ANSWERED
from deployments.http.errors import ApiError

LAST_WORDS_S = 5.0
"""Time for answers to go out after the grace time."""
WATCHERS = "/events"
"""Streams of this path's end only watch: they are ended at once, and their clients look again."""


def stopping() -> ApiError:
    message = "The server is stopping; ask again in a moment"
    return ApiError(503, message, code="server_stopping", headers={"Retry-After": "5", "Connection": "close"})


class Drain:
    """Drain of the application at its end: whether it has begun, and the running requests."""

    def __init__(self) -> None:
        self._begun, self._over = asyncio.Event(), asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    @property
    def has_begun(self) -> bool:
        return self._begun.is_set()

    async def finish(self, grace_s: float) -> None:
        """Refuse new requests from now on. Return when the running ones have ended, or were cut after ``grace_s``."""
        self._begun.set()
        if self._running:
            await asyncio.wait(set(self._running), timeout=grace_s)
        self._over.set()
        if self._running:
            await asyncio.wait(set(self._running), timeout=LAST_WORDS_S)

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request until it ends or the drain ends it. A cut answer says why."""
        answer = _Answer(send)
        end = self._begun if scope["path"].endswith(WATCHERS) else self._over

        async def work() -> None:
            await app(scope, receive, answer.send)

        async def ended() -> None:
            await end.wait()

        task = asyncio.ensure_future(unless(work(), ended()))
        self._running.add(task)
        try:
            await asyncio.shield(task)
        except EndedError:
            await answer.cut(scope, receive)
        finally:
            await cancel(task)
            self._running.discard(task)


class Draining:
    """Hands requests to ``drain``; once it has begun, all but ``GET /health`` are refused with 503."""

    def __init__(self, app: ASGIApp, *, drain: Drain) -> None:
        self.app = app
        self.drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif self.drain.has_begun and scope["path"] != ALWAYS_ANSWERED:
            await stopping().response()(scope, receive, send)
        else:
            await self.drain.run(self.app, scope, receive, send)


class _Answer:
    """The part of an answer that has been sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._is_complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._is_complete = not message.get("more_body", False)
        await self._send(message)

    async def cut(self, scope: Scope, receive: Receive) -> None:
        """End it: with the error's status, as the last event of a stream, or in the middle of a file."""
        if self._start is None:
            await stopping().response()(scope, receive, self._send)
        elif not self._is_complete:
            await self._send({"type": "http.response.body", "body": self._last_event(), "more_body": False})

    def _last_event(self) -> bytes:
        assert self._start is not None
        if not dict(self._start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream"):
            return b""
        return f"event: error\ndata: {json.dumps({'type': 'error'} | stopping().body)}\n\n".encode()
