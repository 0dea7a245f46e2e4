"""The door's own answers, in the shape of all others: what clients get where the application cannot answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from deployments.api.errors import ApiError

RETRY: Mapping[str, str] = {"Retry-After": "2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the client gets with ``status``, in place of HAProxy's page."""

    status: int
    message: str
    code: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> str:
        return json.dumps(ApiError(self.status, self.message, code=self.code).body)

    def page(self) -> str:
        """Returns the whole answer as it goes over the wire."""
        fields = {
            "Content-Type": "application/json",
            "Content-Length": str(len(self.body)),
            "Cache-Control": "no-cache",
        }
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in (fields | dict(self.headers) | {"Connection": "close"}).items()]
        return "\r\n".join((*lines, "", self.body))


UNAVAILABLE = "The server is starting, stopping or recovering; ask again in a moment"
LOST = Answer(status=502, message="The server ended while it worked on this", code="server_lost", headers=RETRY)
ANSWERS = (
    Answer(
        status=400,
        message="This is no HTTP request, or its head (request line and headers) is too large",
        code="bad_request",
    ),
    Answer(status=408, message="The head of the request did not arrive in time", code="request_timeout"),
    Answer(status=500, message="Internal error at the door", code="internal"),
    LOST,
    Answer(status=503, message=UNAVAILABLE, code="server_unavailable", headers=RETRY),
    Answer(status=504, message="The server did not answer in time", code="server_timeout"),
)
HEAD_TOO_LARGE = Answer(
    status=431, message="The head of the request (its line and headers) is too large", code="head_too_large"
)
BODY_UNWANTED = Answer(
    status=413, message="A GET, HEAD, DELETE or OPTIONS request takes no body", code="body_too_large"
)
FULL = Answer(
    status=503, message="There are too many open connections; ask again in a moment", code="server_full",
    headers=RETRY,
)  # fmt: skip


def write_pages(folder: Path) -> dict[int, Path]:
    """Writes the pages that replace HAProxy's own; returns their files by status."""
    pages = {answer.status: folder / f"{answer.status}.http" for answer in ANSWERS}
    for answer in ANSWERS:
        pages[answer.status].write_bytes(answer.page().encode())
    return pages
