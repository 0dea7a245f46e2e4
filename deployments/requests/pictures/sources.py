"""Pictures and clips as clients write them: the bytes of a file, or a URL that holds them (RFC 2397)."""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass

from pybase64 import b64decode

from deployments.requests.pictures.fetch import fetched, origin_of
from deployments.requests.pictures.limits import PictureLimits
from deployments.requests.request_errors import RequestError, shown
from deployments.requests.untrusted import percent_decoded

Source = bytes | str
"""The bytes of a file, or a URL."""

DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
NOWHERE = "are not fetched from elsewhere"
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Encoded pictures and clip of one request."""

    param: str
    """Field of the pictures in the body, for messages."""
    pictures: tuple[Source, ...] = ()
    """Input pictures in the client's order."""
    mask: Source | None = None
    """White where to paint the picture."""
    video: Source | None = None
    """Input clip."""
    further_videos: tuple[Source, ...] = ()
    """Clips after the first, in the client's order."""
    video_mask: Source | None = None
    """A picture, or a clip as long as ``video``."""
    control: Source | None = None
    """Control picture."""

    @property
    def has_mask(self) -> bool:
        return self.mask is not None or self.video_mask is not None

    @property
    def videos(self) -> tuple[Source, ...]:
        """All clips, in the client's order."""
        return () if self.video is None else (self.video, *self.further_videos)

    def check_video_mask(self) -> None:
        """Raise ValueError for a mask of a clip without one."""
        if self.video_mask is not None and self.video is None:
            raise ValueError("mask is that of an input clip, and there is none: send one as video, or leave mask out")

    @property
    def all(self) -> tuple[tuple[str, Source], ...]:
        """Return the pictures, the control picture and the mask, each with the field to blame."""
        pictures = [(self.param, one) for one in self.pictures]
        others = (("control_image", self.control), ("mask", self.mask))
        return (*pictures, *((name, one) for name, one in others if one is not None))


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceKind:
    """The kind of a source: its name in messages, an example of a URL, the error code if it is too large."""

    name: str
    """Noun in messages."""
    example: str
    """Example of a URL."""
    too_large: str
    """Error code above the limit of bytes."""


PICTURE = SourceKind(name="picture", example="data:image/png;base64,…", too_large="picture_too_large")
VIDEO = SourceKind(name="clip", example="data:video/mp4;base64,…", too_large="video_too_large")
VIDEO_MASK = SourceKind(name="clip or picture", example="data:video/mp4;base64,…", too_large="video_too_large")
"""A mask of a clip, before its first bytes say which of both it is."""


def max_bytes_of(kind: SourceKind, limits: PictureLimits) -> int:
    """Return the limit of the bytes of one source."""
    if kind is VIDEO_MASK:
        return max(limits.max_video_bytes, limits.max_picture_bytes)
    return limits.max_video_bytes if kind is VIDEO else limits.max_picture_bytes


def bytes_of(source: Source, param: str, limits: PictureLimits, kind: SourceKind = PICTURE) -> bytes:
    """Return the bytes of ``source`` or of its URL. RequestError for other URLs and above the limit.

    Nothing is fetched but from the configuration's ``picture_origins``.
    """
    max_bytes = max_bytes_of(kind, limits)
    if isinstance(source, bytes):
        check_num_bytes(len(source), param, max_bytes, kind)
        return source
    if ELSEWHERE.match(source):
        if origin_of(source) in limits.picture_origins:
            return fetched(source, param, max_bytes, kind.name, kind.too_large)
        where = f"are fetched from {', '.join(limits.picture_origins)} alone" if limits.picture_origins else NOWHERE
        message = f"{param} is {shown(source)}: {kind.name}s {where}; send the file, or {kind.example}"
        raise RequestError(message, param)
    head = DATA_URL.match(source)
    if head is None:
        allowed = f"it must be a file, or a URL that holds one: {kind.example}"
        raise RequestError(f"{param} is {shown(source)}: {allowed}", param)
    text = percent_decoded(source[head.end() :].encode(errors="replace"))
    check_num_bytes(len(text) // 4 * 3 - text[-2:].count(b"="), param, max_bytes, kind)
    try:
        return b64decode(text, validate=True)
    except binascii.Error as error:
        raise RequestError(f"{param} is no base64 after {head.group()[:40]!r}: {error}", param) from None


def check_num_bytes(num_bytes: int, param: str, max_bytes: int, kind: SourceKind) -> None:
    """Raise RequestError for a source of more than ``max_bytes``."""
    if num_bytes > max_bytes:
        message = f"{param} has {num_bytes} bytes; a {kind.name} may have {max_bytes} at most"
        raise RequestError(message, param, code=kind.too_large)
