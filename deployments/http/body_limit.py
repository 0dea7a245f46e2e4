"""Limits of a request body: size, duration, and how much of an unread body is drained."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.errors import ApiError

BODY_METHODS = ("POST", "PUT", "PATCH")
STRAY_BYTES = 1 << 16
"""Bytes that are read of the body of any other method while its request is answered."""
DRAIN_BYTES = 16 << 20
DRAIN_S = 2.0


class BodyLimit:
    """Refuses bodies above ``max_bytes`` with 413, and those not complete after ``deadline_s`` with 408.

    Paths of ``uploads`` have limits of their own. The check is made when a route reads the body, so that other errors
    are answered first. An answer before the body's end closes the connection: the rest is not read.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, deadline_s: float, uploads: Mapping[str, int]) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.deadline_s = deadline_s
        self.uploads = uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not has_body(headers := Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        is_stray = scope["method"] not in BODY_METHODS
        limit = STRAY_BYTES if is_stray else self.uploads.get(scope["path"], self.max_bytes)
        body = _Body(receive, send, max_bytes=limit, deadline_s=self.deadline_s, is_stray=is_stray)
        await self.app(scope, body.receive if declared_length(headers) <= limit else body.receive_none, body.send)


class _Body:
    """One request's body on its way to the application, and the answer on its way back.

    A stray body belongs to a method that takes none. Above the limit it counts as the end of the connection, so an
    endless body cannot keep a stream of events open.
    """

    def __init__(self, receive: Receive, send: Send, *, max_bytes: int, deadline_s: float, is_stray: bool) -> None:
        self._receive = receive
        self._send = send
        self._max_bytes = max_bytes
        self._deadline_s = deadline_s
        self._end_s = asyncio.get_running_loop().time() + deadline_s
        self._num_bytes = 0
        self._is_stray = is_stray
        self._is_whole = False

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._end_s):
                message = await self._receive()
        except TimeoutError:
            return self._refuse(too_slow(self._deadline_s))
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            return await self.receive_none()
        self._is_whole = not message.get("more_body", False)
        return message

    async def receive_none(self) -> Message:
        """Refuse the body, in place of ``receive``, since it is known to be too large."""
        return self._refuse(ApiError(413, f"The body is larger than {self._max_bytes} bytes"))

    def _refuse(self, error: ApiError) -> Message:
        if not self._is_stray:
            raise error
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send the answer. Before its end, drain some of the unread body.

        A connection closed upon unread data is reset, and the client may never see the answer.
        """
        if message["type"] == "http.response.start" and not self._is_whole:
            MutableHeaders(scope=message)["Connection"] = "close"
        if message["type"] == "http.response.body" and not message.get("more_body", False) and not self._is_whole:
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def _drain(self) -> None:
        num_bytes = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while num_bytes < DRAIN_BYTES:
                    message = await self._receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


def too_slow(deadline_s: float) -> ApiError:
    text = f"The body was not here after {deadline_s:g} s; send it faster, or less of it"
    return ApiError(408, text, code="body_timeout")


def has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def declared_length(headers: Headers) -> int:
    """Return the declared length in bytes; 0 without one."""
    length = headers.get("content-length", "0")
    return int(length[:20]) if length.isascii() and length.isdigit() else 0
