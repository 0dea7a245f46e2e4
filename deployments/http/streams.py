"""Events of running requests on their way to a client, and nothing left running when it is gone.

Server-sent events: HTML Living Standard, section 9.2.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi.sse import EventSourceResponse, format_sse_event
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from deployments.asyncio_tools import EndedError, IdleError, Upcoming, to_the_end, unless
from deployments.http.errors import ApiError, from_failure
from deployments.http.settings import ApiSettings

logger = logging.getLogger("troupe.api")

T = TypeVar("T")

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
KEEPALIVE = format_sse_event(comment="nothing new")


class Event(BaseModel):
    """The data of one event; ``type`` is its name as well."""

    type: str

    def encode(self) -> bytes:
        return format_sse_event(event=self.type, data_str=self.model_dump_json())


class EventStream(EventSourceResponse):
    """Sends ``first`` (None: nothing yet) and the ``rest`` until the client is gone, and closes ``rest`` at once.

    A comment is sent whenever nothing happened for ``keepalive_s``. ``rest`` holds jobs in a gang, which must not run
    until the garbage collector finds it.
    """

    def __init__(
        self, first: Event | None, rest: Upcoming[Event], keepalive_s: float, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        self._first, self._rest, self._keepalive_s = first, rest, keepalive_s
        self.at_end = AsyncExitStack()
        """Is closed after the stream, however that ends."""
        super().__init__((), headers={**STREAM_HEADERS, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.at_end:
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            chunk: bytes | None = self._first.encode() if self._first else KEEPALIVE
            while chunk is not None:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await self._next_chunk()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next_chunk(self) -> bytes | None:
        """Return the next bytes; None at the end."""
        try:
            event = await self._rest.next(self._keepalive_s)
        except IdleError:
            return KEEPALIVE
        except Exception as failure:
            return _error_bytes(failure)
        return None if event is None else event.encode()


async def start_stream(
    events: AsyncGenerator[Event],
    receive: Receive,
    settings: ApiSettings,
    headers: Callable[[], Mapping[str, str]] = dict,
) -> EventStream:
    """Return a response with ``events`` once the first is there, or ``first_event_wait_s`` is over.

    ``headers`` is called then. An error of ``events`` before that is raised here, so that it has its own HTTP status; a
    later one becomes an event named error.
    """
    upcoming, first = Upcoming(events), None
    try:
        with suppress(IdleError):
            first = await until_disconnect(receive, upcoming.next(settings.first_event_wait_s))
        return EventStream(first, upcoming, settings.keepalive_s, headers())
    except BaseException:  # a cancellation that comes together with the first event, too
        await to_the_end(upcoming.aclose())
        raise


def _error_bytes(failure: Exception) -> bytes:
    error = from_failure(failure)
    if error is None:
        logger.error("a stream broke", exc_info=failure)
        error = ApiError(500, "Internal error while streaming; the log has more", code="internal")
    return format_sse_event(event="error", data_str=json.dumps({"type": "error"} | error.body))


class ClientGoneError(Exception):
    """The client closed the connection before its answer was ready."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. If the client leaves first, ``work`` is cancelled and ClientGoneError raised.

    ``receive`` is the ASGI channel after the body was read. Cancelling this call cancels ``work`` as well.
    """
    try:
        return await unless(work, _disconnected(receive))
    except EndedError:
        raise ClientGoneError from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
