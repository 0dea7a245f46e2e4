"""Partial answers: the head alone, a byte range, or 304; and whole answers for clients of HTTP/1.0."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, MalformedRangeHeader, RangeNotSatisfiable
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.clips.objects import StoredObject
from deployments.http.errors import ApiError
from deployments.requests.request_errors import shown

CONDITIONS = StaticFiles()
"""Reads ``If-None-Match`` and ``If-Modified-Since``; it serves nothing."""

BODILESS = (204, 304)
"""Answers that have no body, and say no length (RFC 9110, section 8.6)."""
RANGE_HEADERS = (b"range", b"if-range")
IS_HEAD = "troupe.is_head"
"""Key in the ASGI scope of a GET that was a HEAD."""


class HeadAsGet:
    """Answers HEAD wherever GET is, with the same headers and no body (RFC 9110, section 9.3.2).

    A range is for GET alone (section 14.2): HEAD describes the whole.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        headers = [(name, value) for name, value in scope["headers"] if name not in RANGE_HEADERS]
        asked = {**scope, "method": "GET", "headers": headers, IS_HEAD: True}
        try:
            await self.app(asked, receive, send_head)
        finally:
            scope["route"] = asked.get("route")  # metrics count answers by it


class WholeForOld:
    """Answers clients of HTTP/1.0 with a length in place of chunks (RFC 9112, section 6.1).

    Servers below, and the door, would write chunks for any client.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_old = scope["type"] == "http" and scope.get("http_version") == "1.0" and scope["method"] != "HEAD"
        await self.app(scope, receive, _whole(send) if is_old else send)


def _whole(send: Send) -> Send:
    """Return a ``send`` that holds an answer of unknown length until it is there."""
    held: Message | None = None
    body = bytearray()

    async def send_whole(message: Message) -> None:
        nonlocal held
        if message["type"] == "http.response.start" and "content-length" not in Headers(raw=message["headers"]):
            held = message
        elif held is None or message["type"] != "http.response.body":
            await send(message)
        else:
            body.extend(message.get("body", b""))
            if not message.get("more_body", False):
                if held["status"] not in BODILESS:
                    MutableHeaders(scope=held)["Content-Length"] = str(len(body))
                await send(held)
                await send({**message, "body": bytes(body)})

    return send_whole


def is_head(request: Request) -> bool:
    """Return whether the request is HEAD, whose answer has no body."""
    return IS_HEAD in request.scope


class RangedFile(FileResponse):
    """A file, one range of it, or 304 for a client that has it already (RFC 9110, sections 13 and 14).

    It is one file from the first byte to the last, also if it is replaced or deleted meanwhile.

    An invalid range is ignored, and a range beyond the file is ApiError 416. Starlette refuses the former, and answers
    the latter without an error's body; it also serves several ranges, in one multipart body.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            file = await asyncio.to_thread(Path(self.path).open, "rb")
        except FileNotFoundError:  # deleted since it was looked for
            raise ApiError(404, "The file is gone") from None
        with file:
            self.path = f"/dev/fd/{file.fileno()}"  # by its name another one might be opened
            self.stat_result = os.fstat(file.fileno())
            self.set_stat_headers(self.stat_result)
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "GET":
            await super().__call__(scope, receive, send)
        elif CONDITIONS.is_not_modified(self.headers, Headers(scope=scope)):
            await NotModifiedResponse(self.headers)(scope, receive, send)
        else:
            method = "HEAD" if IS_HEAD in scope else "GET"
            await super().__call__({**scope, "method": method}, receive, send)

    @classmethod
    def _parse_range_header(cls, http_range: str, file_size: int) -> list[tuple[int, int]]:
        try:
            ranges = super()._parse_range_header(http_range, file_size)
        except MalformedRangeHeader:
            return []
        except RangeNotSatisfiable:
            message = f"Range is {shown(http_range)}; the file has {file_size} bytes"
            headers = {"Content-Range": f"bytes */{file_size}"}
            raise ApiError(416, message, code="range_not_satisfiable", headers=headers) from None
        return ranges if len(ranges) == 1 else []


class RangedObject(RangedFile):
    """A ``RangedFile`` in object storage, of which only the requested ranges are read."""

    def __init__(self, stored: StoredObject, **options: Any) -> None:
        super().__init__(stored.name, **options)
        self._stored = stored

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.stat_result = self._stored.stat_result
        self.set_stat_headers(self.stat_result)
        extensions = {**(scope.get("extensions") or {})}
        extensions.pop("http.response.pathsend", None)  # it has no path here
        await self._answer({**scope, "extensions": extensions}, receive, send)

    @asynccontextmanager
    async def _open_file(self) -> AsyncIterator[anyio.AsyncFile[bytes]]:
        file = await asyncio.to_thread(self._stored.open)
        try:
            yield anyio.wrap_file(file)
        finally:
            await asyncio.to_thread(file.close)


def ranged(file: Path | StoredObject, **options: Any) -> RangedFile:
    """Return the answer with ``file``. ``options`` are those of ``FileResponse``."""
    return RangedFile(file, **options) if isinstance(file, Path) else RangedObject(file, **options)
