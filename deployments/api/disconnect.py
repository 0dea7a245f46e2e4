"""Work that stops when its client goes away."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from deployments.asyncio_tools import EndedError, unless

T = TypeVar("T")


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
