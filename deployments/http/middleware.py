"""Middleware of every request: its id, the access log, and the answer to an unhandled error."""

from __future__ import annotations

import logging
import re
import time
import uuid

from ray.exceptions import RayError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.errors import internal_error
from deployments.names import HEALTH
from deployments.observability.logs import request_context
from deployments.observability.metrics import observe_answer
from deployments.requests.rules import Requester

CLIENT_GONE = 499
"""Status in the access log if the client left before the answer, as in nginx."""
MAX_ID_CHARS = 128
SANE_REQUEST_ID = re.compile(rf"[A-Za-z0-9._:\-]{{1,{MAX_ID_CHARS}}}")

HEALTH_ANSWERS = (200, 503)
REQUESTER = "troupe.requester"
"""Key in the ASGI scope of the ``Requester``, still without its key."""

access_logger = logging.getLogger("troupe.access")


class RequestLog:
    """Gives each request an id (the client's own ``X-Request-Id`` if it is sane), answers with it, logs one line.

    The id and the arrival are a ``Requester`` in the scope. ``GET /health``, which is polled, is logged only when its
    status changes. Without ``sends_request_id`` the proxy in front returns the client's id, even an invalid one. It
    is logged, escaped and cut; an id is sent only if the client's is empty. An unhandled exception becomes a 500
    in OpenAI's shape, and its traceback a log record.

    A proxy that dies during a request closes the connection, which counts as a client that left, not as an error.
    """

    def __init__(self, app: ASGIApp, *, sends_request_id: bool) -> None:
        self.app = app
        self.sends_request_id = sends_request_id
        self._last_health: int | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get("x-request-id")
        request_id = choose_request_id(client_id, keeps_any=not self.sends_request_id)
        scope[REQUESTER] = Requester(request_id=request_id)
        with request_context(request_id):
            await self._run(scope, receive, send, request_id, sends_id=self.sends_request_id or client_id == "")

    async def _run(self, scope: Scope, receive: Receive, send: Send, request_id: str, *, sends_id: bool) -> None:
        status = 0
        start_s = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if sends_id:
                    MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self.app(scope, until_lost(receive), send_with_id)
        except ClientDisconnect:  # in the middle of a body, or of an answer
            status = CLIENT_GONE
        except Exception as failure:
            error = internal_error(failure, request_id)
            if status:
                raise
            await error.response()(scope, receive, send_with_id)
        finally:
            if not self._repeats_itself(scope, status):
                _log_access(scope, status, time.perf_counter() - start_s)
            observe_answer(scope["method"], getattr(scope.get("route"), "path", ""), status or CLIENT_GONE)

    def _repeats_itself(self, scope: Scope, status: int) -> bool:
        if (scope["method"], scope["path"]) != ("GET", HEALTH) or status not in HEALTH_ANSWERS:
            return False
        before, self._last_health = self._last_health, status
        return status == before


def until_lost(receive: Receive) -> Receive:
    """Return ``receive`` with a lost proxy reported as a disconnect, from then on."""
    is_lost = False

    async def receive_or_end() -> Message:
        nonlocal is_lost
        if not is_lost:
            try:
                return await receive()
            except RayError:
                is_lost = True
        return {"type": "http.disconnect"}

    return receive_or_end


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
        "status": status or CLIENT_GONE,  # no answer was sent: the client, or the application, went away first
        "duration_ms": round(1000 * duration_s, 1),
        "client": (scope.get("client") or ("",))[0],
    }
    access_logger.info("%(method)s %(path)s %(status)s", fields, extra=fields)
