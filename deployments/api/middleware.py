"""What happens around every request: its id, the access log, the limit on its body, an answer if all else fails."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.errors import ApiError
from deployments.observability.logs import request_context
from deployments.observability.metrics import observe_answer

DRAIN_BYTES = 16 << 20
DRAIN_S = 2.0
MAX_ID_CHARS = 128
SANE_REQUEST_ID = re.compile(rf"[A-Za-z0-9._:\-]{{1,{MAX_ID_CHARS}}}")

GONE = 499
"""No answer was sent: the client, or the application, went away first."""

access_logger = logging.getLogger("troupe.access")
logger = logging.getLogger("troupe.api")


class RequestLog:
    """Gives each request an id (the client's own ``X-Request-Id`` if it is sane), answers with it, logs one line.

    Without ``sends_request_id`` a proxy answers with the client's own whatever it is: then that one is logged, escaped
    and cut. An exception that nobody handled becomes a 500 in OpenAI's shape, and its traceback a log record.
    """

    def __init__(self, app: ASGIApp, *, sends_request_id: bool) -> None:
        self.app = app
        self.sends_request_id = sends_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = choose_request_id(Headers(scope=scope).get("x-request-id"), keeps_any=not self.sends_request_id)
        scope.setdefault("state", {})["request_id"] = request_id
        with request_context(request_id):
            await self._run(scope, receive, send, request_id)

    async def _run(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        status = 0
        start_s = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.sends_request_id:
                    MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            logger.exception("unhandled error")
            if status:
                raise
            error = ApiError(500, f"Internal error; the log has more under request id {request_id}", code="internal")
            await error.response()(scope, receive, send_with_id)
        finally:
            _log_access(scope, status, time.perf_counter() - start_s)
            observe_answer(scope["method"], getattr(scope.get("route"), "path", ""), status or GONE)


class BodyLimit:
    """Refuses bodies above ``max_bytes``: at once if their length is declared, else as soon as they grow past it."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > self.max_bytes:
            await self._drain(receive)
            await self._error().response()(scope, receive, send)
            return
        num_bytes = 0

        async def limited_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                await self._drain(receive)
                raise self._error()
            return message

        await self.app(scope, limited_receive, send)

    def _error(self) -> ApiError:
        message = f"The body is larger than {self.max_bytes} bytes"
        return ApiError(413, message, headers={"Connection": "close"})

    async def _drain(self, receive: Receive) -> None:
        """Reads on for a while: a connection closed upon unread data is reset, and the client never sees the answer."""
        num_bytes = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while num_bytes < DRAIN_BYTES:
                    message = await receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


def choose_request_id(client_id: str | None, *, keeps_any: bool) -> str:
    if client_id and SANE_REQUEST_ID.fullmatch(client_id):
        return client_id
    if client_id and keeps_any:
        return ascii(client_id)[1:-1][:MAX_ID_CHARS]
    return f"req_{uuid.uuid4().hex}"


def _log_access(scope: Scope, status: int, duration_s: float) -> None:
    fields = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status or GONE,
        "duration_ms": round(1000 * duration_s, 1),
        "client": (scope.get("client") or ("",))[0],
    }
    access_logger.info("%(method)s %(path)s %(status)s", fields, extra=fields)
