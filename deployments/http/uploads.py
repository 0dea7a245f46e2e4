"""Bodies with pictures in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Message, Receive

from deployments.http.body import read_json_or_form
from deployments.http.context import ApiContext
from deployments.requests.bodies import MediaBody
from deployments.requests.rules import Requester, ResolvedRequest
from pipelines.request import MediaKind

B = TypeVar("B", bound=MediaBody)


async def read_upload(
    context: ApiContext, request: Request, body_type: type[B], kind: MediaKind, requester: Requester
) -> ResolvedRequest[B]:
    """Return the body with its model, of ``kind``, and its decoded pictures.

    Its bytes beyond the limit of other bodies take memory of ``Admission`` meanwhile. ApiError 503 without room.
    """
    with context.admission.memory.taken() as take:
        receive = counting(request.receive, take, context.settings.max_body_bytes)
        body = await read_json_or_form(Request(request.scope, receive), body_type)
        return await context.resolved(body, kind, requester)


def counting(receive: Receive, take: Callable[[int], None], num_free: int) -> Receive:
    """Return ``receive``, which calls ``take`` with the number of bytes after the first ``num_free``."""
    num_bytes = 0

    async def receive_and_count() -> Message:
        nonlocal num_bytes
        message = await receive()
        before = max(num_bytes, num_free)
        num_bytes += len(message.get("body", b""))
        take(max(num_bytes, num_free) - before)
        return message

    return receive_and_count
