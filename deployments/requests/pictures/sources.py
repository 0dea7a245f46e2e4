"""Pictures as clients write them: the bytes of a file, or a URL that holds them (RFC 2397)."""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from pybase64 import b64decode

from deployments.requests.pictures.fetch import fetched, origin_of
from deployments.requests.pictures.limits import PictureLimits
from deployments.requests.request_errors import RequestError, shown

Source = bytes | str
"""The bytes of a file, or a URL."""

DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
EXAMPLE = "data:image/png;base64,…"
NOWHERE = "are not fetched from elsewhere"
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """What came along with one request, still packed. ``param`` is the field of the pictures, for messages."""

    param: str
    pictures: tuple[Source, ...] = ()
    mask: Source | None = None

    @property
    def all(self) -> tuple[tuple[str, Source], ...]:
        """Returns the pictures and the mask, each with the field to blame."""
        pictures = [(self.param, one) for one in self.pictures]
        return (*pictures, *([] if self.mask is None else [("mask", self.mask)]))


def bytes_of(source: Source, param: str, limits: PictureLimits) -> bytes:
    """Return the bytes of ``source`` or of its URL. RequestError for other URLs and above the limit.

    Nothing is fetched but from the configuration's ``picture_origins``.
    """
    max_bytes = limits.max_picture_bytes
    if isinstance(source, bytes):
        _check_length(len(source), param, max_bytes)
        return source
    if ELSEWHERE.match(source):
        if origin_of(source) in limits.picture_origins:
            return fetched(source, param, max_bytes)
        where = f"are fetched from {', '.join(limits.picture_origins)} alone" if limits.picture_origins else NOWHERE
        raise RequestError(f"{param} is {shown(source)}: pictures {where}; send the file, or {EXAMPLE}", param)
    head = DATA_URL.match(source)
    if head is None:
        raise RequestError(f"{param} is {shown(source)}: it must be a file, or a URL that holds one: {EXAMPLE}", param)
    text = source[head.end() :].encode(errors="replace")
    if b"%" in text:
        text = unquote_to_bytes(text)
    _check_length(len(text) // 4 * 3 - text[-2:].count(b"="), param, max_bytes)
    try:
        return b64decode(text, validate=True)
    except binascii.Error as error:
        raise RequestError(f"{param} is no base64 after {head.group()[:40]!r}: {error}", param) from None


def _check_length(num_bytes: int, param: str, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        message = f"{param} has {num_bytes} bytes; a picture may have {max_bytes} at most"
        raise RequestError(message, param, code="picture_too_large")
