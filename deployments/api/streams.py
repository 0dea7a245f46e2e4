"""Events of running requests on their way to a client, and nothing left running when it is gone.

Server-sent events: HTML Living Standard, section 9.2.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.api.errors import ApiError, from_failure
from deployments.api.settings import ApiSettings
from deployments.asyncio_tools import EndedError, next_or_none, unless, with_idle

logger = logging.getLogger("troupe.api")

T = TypeVar("T")

KEEPALIVE = b": nothing new\n\n"


class ClientGoneError(Exception):
    """The client closed the connection before its answer was ready."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns. If the client goes away first, ``work`` is cancelled and ClientGoneError raised.

    ``receive`` is the ASGI channel after the body was read. Cancelling this call cancels ``work`` as well.
    """
    try:
        return await unless(work, _disconnected(receive))
    except EndedError:
        raise ClientGoneError from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Event(BaseModel):
    """The data of one event; ``type`` is its name as well."""

    type: str

    def encode(self) -> bytes:
        return f"event: {self.type}\ndata: {self.model_dump_json()}\n\n".encode()


class EventStream(Response):
    """Sends ``chunks`` as they come and closes them at the end, or as soon as the client is gone."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes]) -> None:
        self.chunks = chunks
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send(send))
        except ClientGoneError:
            logger.info("the client left the stream")

    async def _send(self, send: Send) -> None:
        async with aclosing(self.chunks):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self.chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def start_stream(events: AsyncGenerator[Event], receive: Receive, settings: ApiSettings) -> EventStream:
    """A response with ``events``, once the first is there or ``first_event_wait_s`` over.

    What ``events`` raises until then is raised here, so that it gets its own HTTP status; later it becomes an event
    named error. A comment is sent whenever nothing happened for ``keepalive_s``.
    """
    beats = with_idle(events, settings.first_event_wait_s, settings.keepalive_s)
    first = await until_disconnect(receive, next_or_none(beats))
    return EventStream(_chunks(first, beats))


async def _chunks(first: Event | None, rest: AsyncGenerator[Event | None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        yield first.encode() if first else KEEPALIVE
        try:
            async for event in rest:
                yield event.encode() if event else KEEPALIVE
        except Exception as failure:
            yield _error_bytes(failure)


def _error_bytes(failure: Exception) -> bytes:
    error = from_failure(failure)
    if error is None:
        logger.error("a stream broke", exc_info=failure)
        error = ApiError(500, "Internal error while streaming; the log has more", code="internal")
    return f"event: error\ndata: {json.dumps({'type': 'error'} | error.body)}\n\n".encode()
