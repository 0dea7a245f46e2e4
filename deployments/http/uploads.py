"""Bodies with pictures or clips in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Message, Receive

from deployments.http.body import read_json_or_form
from deployments.http.context import ApiContext
from deployments.http.lookups import read_source
from deployments.requests.bodies import MediaBody
from deployments.requests.rules import Requester, ResolvedRequest
from pipelines.request import MediaKind

B = TypeVar("B", bound=MediaBody)


def as_it_is(body: B) -> B:
    return body


async def read_upload(
    context: ApiContext,
    request: Request,
    requester: Requester,
    body_type: type[B],
    kind: MediaKind,
    adapt: Callable[[B], B] = as_it_is,
) -> ResolvedRequest[B]:
    """Return the body, which ``adapt`` may change, with its model, of ``kind``, and its decoded pictures and clip.

    Bytes beyond the limit of other bodies, and those of a file that it names, count in ``Admission.memory`` meanwhile.
    ApiError 503 without room.
    """
    with context.admission.memory.taken() as take:
        receive = counting(request.receive, take, context.settings.max_body_bytes)
        body = await read_json_or_form(Request(request.scope, receive), body_type)
        read = partial(read_source, context, requester, take=take)
        return await context.resolved(adapt(body), kind, requester, read)


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
