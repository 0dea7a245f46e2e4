"""Events of running requests on their way to a client, and nothing left running when it is gone.

Server-sent events: HTML Living Standard, section 9.2.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi.sse import EventSourceResponse, format_sse_event
from pydantic import BaseModel
from starlette.types import Receive, Send

from deployments.api.errors import ApiError, from_failure
from deployments.api.settings import ApiSettings
from deployments.asyncio_tools import EndedError, next_or_none, to_the_end, unless, with_idle

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
    """Sends ``first`` and ``rest`` (None: nothing new) until the client is gone, and closes ``rest`` at once.

    It holds jobs in a gang: they are not to run until somebody collects garbage.
    """

    def __init__(
        self, first: Event | None, rest: AsyncGenerator[Event | None], headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        self._chunks, self._rest = _chunks(first, rest), rest
        super().__init__(self._chunks, headers={**STREAM_HEADERS, **headers})

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._rest), aclosing(self._chunks):
            await super().stream_response(send)


async def start_stream(
    events: AsyncGenerator[Event], receive: Receive, settings: ApiSettings, headers: Mapping[str, str] = NO_HEADERS
) -> EventStream:
    """Returns a response with ``events``, once the first is there or ``first_event_wait_s`` over, and with what is then
    in ``headers``.

    What ``events`` raises until then is raised here, so that it gets its own HTTP status; later it becomes an event
    named error. A comment is sent whenever nothing happened for ``keepalive_s``.
    """
    beats = with_idle(events, settings.first_event_wait_s, settings.keepalive_s)
    try:
        first = await until_disconnect(receive, next_or_none(beats))
    except BaseException:  # a cancellation that comes together with the first event, too
        await to_the_end(beats.aclose())
        raise
    return EventStream(first, beats, headers)


async def _chunks(first: Event | None, rest: AsyncGenerator[Event | None]) -> AsyncGenerator[bytes]:
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
    return format_sse_event(event="error", data_str=json.dumps({"type": "error"} | error.body))


class ClientGoneError(Exception):
    """The client closed the connection before its answer was ready."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns what ``work`` does. If the client goes away first, ``work`` is cancelled and ClientGoneError raised.

    ``receive`` is the ASGI channel after the body was read. Cancelling this call cancels ``work`` as well.
    """
    try:
        return await unless(work, _disconnected(receive))
    except EndedError:
        raise ClientGoneError from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
