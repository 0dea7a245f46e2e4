"""Pictures and clips that lie elsewhere, at an origin that the configuration trusts."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from deployments.requests.request_errors import RequestError, shown

if TYPE_CHECKING:
    import httpx

ORIGIN = re.compile(r"https?://[^/\s]+")
FETCHED_WITHIN_S = 20.0
PLAIN = {"Accept-Encoding": "identity"}
"""A compressed file of 64 kB may have gigabytes, in one piece."""


def origin_of(url: str) -> str:
    """Return scheme, host and port in the configuration's form; "" for an invalid URL."""
    try:
        parts = urlsplit(url)
        return f"{parts.scheme.lower()}://{(parts.hostname or '').lower()}" + (f":{parts.port}" if parts.port else "")
    except ValueError:
        return ""


def fetched(url: str, param: str, max_bytes: int, kind: str, too_large: str) -> bytes:
    """Return the file at ``url``, a ``kind`` whose origin was checked. Blocks, so not for an event loop.

    RequestError if it is not there, is larger, takes too long, or lies behind a redirection: that might lead anywhere.
    """
    import httpx

    try:
        with httpx.stream(
            "GET", url, headers=PLAIN, follow_redirects=False, timeout=FETCHED_WITHIN_S, trust_env=False
        ) as answer:
            if answer.status_code != httpx.codes.OK:
                raise RequestError(f"{param} is {shown(url)}: its server answered {answer.status_code}", param)
            if (coding := answer.headers.get("content-encoding", "identity")) != "identity":
                raise RequestError(
                    f"{param} is {shown(url)}: its server sent it compressed with {shown(coding)}", param
                )
            if (data := _whole(answer, url, param, max_bytes)) is None:
                message = f"{param} is {shown(url)}: it has more than {max_bytes} bytes; a {kind} may not"
                raise RequestError(message, param, code=too_large)
            return data
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        cause = type(error).__name__
        raise RequestError(f"{param} is {shown(url)}, which could not be fetched ({cause})", param) from error


def _whole(answer: httpx.Response, url: str, param: str, max_bytes: int) -> bytes | None:
    """Return the content; None if it has more than ``max_bytes``."""
    end_s = time.monotonic() + FETCHED_WITHIN_S
    data = bytearray()
    for piece in answer.iter_raw():
        data += piece
        if len(data) > max_bytes:
            return None
        if time.monotonic() > end_s:
            raise RequestError(f"{param} is {shown(url)}: it came too slowly", param)
    return bytes(data)
