"""``Range`` headers, RFC 9110 section 14: one that makes no sense is ignored, one beyond the file is a 416."""

from __future__ import annotations

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Scope

from deployments.api.errors import ApiError
from deployments.requests.errors import shown

ONE_RANGE = re.compile(r"\s*bytes\s*=\s*(\d{0,18})-(\d{0,18})\s*", re.ASCII)


def tame_range(scope: Scope, num_bytes: int) -> None:
    """Leave one valid range in the request, or none: what the file response gets to see cannot fail any more."""
    given = Headers(scope=scope).get("range")
    if given is None:
        return
    match = ONE_RANGE.fullmatch(given)
    if match is None or match.groups() == ("", "") or _backwards(*match.groups()):
        del MutableHeaders(scope=scope)["range"]
        return
    first, last = match.groups()
    if (first and int(first) >= num_bytes) or (not first and int(last) == 0):
        message = f"Range is {shown(given)}; the file has {num_bytes} bytes"
        raise ApiError(416, message, code="range_not_satisfiable", headers={"Content-Range": f"bytes */{num_bytes}"})


def _backwards(first: str, last: str) -> bool:
    return bool(first and last) and int(last) < int(first)
