"""Error answers of the door, in the API's format, for when the application cannot answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from deployments.http.body_limit import STRAY_BYTES, too_slow
from deployments.http.errors import ApiError

RETRY_S = 2
"""Seconds to the next attempt, unless an outage is expected to take longer."""
RETRY: Mapping[str, str] = {"Retry-After": str(RETRY_S)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer in place of HAProxy's error page."""

    status: int
    """HTTP status."""
    message: str
    """Explanation for people."""
    code: str
    """Code for programs."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further fields of the head."""

    @property
    def body(self) -> str:
        return json.dumps(ApiError(self.status, self.message, code=self.code).body)

    def page(self) -> str:
        """Return the whole HTTP response."""
        fields = {
            "Content-Type": "application/json",
            "Content-Length": str(len(self.body)),
            "Cache-Control": "no-cache",
        }
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in (fields | dict(self.headers) | {"Connection": "close"}).items()]
        return "\r\n".join((*lines, "", self.body))

    def write(self, folder: Path) -> Path:
        """Write the page into ``folder``; return its file."""
        file = folder / f"{self.code}_{self.status}.http"
        file.write_bytes(self.page().encode())
        return file

    @property
    def action(self) -> str:
        """The action of an HAProxy rule with this answer. Headers may contain HAProxy expressions."""
        headers = " ".join(f"hdr {name} {value}" for name, value in self.headers.items())
        body = self.body.replace("\\", "\\\\").replace('"', '\\"').replace(" ", "\\ ")
        return f"return status {self.status} content-type application/json {headers} string {body}"


UNAVAILABLE = "The server is starting, stopping or recovering; ask again in a moment"
LOST = Answer(status=502, message="The server ended while it worked on this", code="server_lost", headers=RETRY)
STOPPED = Answer(status=503, message=UNAVAILABLE, code="server_unavailable", headers=RETRY)
AGAIN = Answer(status=425, message="The application is lost; the door sends this again", code="server_lost")
"""Between the door's own frontends. The application has no answer of this status."""
ANSWERS = (
    Answer(
        status=400,
        message="This is no HTTP request, its head (request line and headers) is too large, or the client closed its "
        "side of the connection before the answer",
        code="bad_request",
    ),
    Answer(status=408, message="The head of the request did not arrive in time", code="request_timeout"),
    Answer(status=500, message="Internal error at the door", code="internal"),
    LOST,
    STOPPED,
    Answer(status=504, message="The server did not answer in time", code="server_timeout"),
)
HEAD_TOO_LARGE = Answer(
    status=431, message="The head of the request (its line and headers) is too large", code="head_too_large"
)
BODY_UNWANTED = Answer(
    status=413,
    message=f"A GET, HEAD, DELETE or OPTIONS request takes no body, and more than {STRAY_BYTES} bytes were sent",
    code="body_too_large",
)
NOTHING = Answer(status=404, message="There is nothing at this path", code="not_found")
FULL = Answer(
    status=503, message="There are too many open connections; ask again in a moment", code="server_full",
    headers=RETRY,
)  # fmt: skip

ALL_TAKEN = Answer(
    status=429,
    message="All places for pictures are taken; try again after the seconds in Retry-After",
    code="queue_full",
    # Random until the end of all running requests, so that not all retry at once.
    headers={"Retry-After": "%[rand(1000),mul(proc.wait),div(1000),add(1)]"},
)
WAITED_TOO_LONG = Answer(
    status=503, message="There are too many requests for pictures; ask again in a moment", code="server_full",
    headers=RETRY,
)  # fmt: skip


def slow_body(deadline_s: float) -> Answer:
    """Return the application's answer to a body that is too slow."""
    error = too_slow(deadline_s)
    return Answer(status=error.status, message=error.message, code=str(error.code))


def write_pages(folder: Path) -> dict[int, Path]:
    """Write the pages that replace HAProxy's own; return their files by status."""
    return {answer.status: answer.write(folder) for answer in ANSWERS}
