"""Bodies with pictures in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Message, Receive

from deployments.api.context import ApiContext
from deployments.api.reading.body import read_json_or_form
from deployments.requests.bodies import MediaBody
from pipelines.request import InputPictures, MediaKind

B = TypeVar("B", bound=MediaBody)


async def read_upload(
    context: ApiContext, request: Request, body_type: type[B], kind: MediaKind
) -> tuple[B, InputPictures]:
    """Returns the body and its pictures, unpacked, for a model of ``kind``.

    Meanwhile what it has beyond the bytes of other bodies takes room. ApiError 503 where there is none.
    """
    with context.admission.memory.taken() as take:
        receive = counting(request.receive, take, context.settings.max_body_bytes)
        body = await read_json_or_form(Request(request.scope, receive), body_type)
        return body, await context.unpacked(body, kind)


def counting(receive: Receive, take: Callable[[int], None], num_free: int) -> Receive:
    """Returns ``receive``; for each byte after the first ``num_free``, ``take`` is told."""
    num_bytes = 0

    async def receive_and_count() -> Message:
        nonlocal num_bytes
        message = await receive()
        before = max(num_bytes, num_free)
        num_bytes += len(message.get("body", b""))
        take(max(num_bytes, num_free) - before)
        return message

    return receive_and_count
