"""Limits of the pictures, clips and sounds in a request."""

from __future__ import annotations

import time
from dataclasses import dataclass

from deployments.checks import check_positive
from deployments.requests.pictures.fetch import ORIGIN
from deployments.requests.request_errors import RequestError
from pipelines.request import InputPictures


@dataclass(frozen=True, kw_only=True)
class PictureLimits:
    """Configurable limits of input pictures and clips. It has no slots, since its section has further parents."""

    max_input_pictures: int = 16
    """Limit of a request's pictures."""
    max_picture_bytes: int = 20 << 20
    """Limit of each picture as sent."""
    max_picture_pixels: int = 50_000_000
    """Limit of the pixels of a request's pictures together, the mask included."""
    max_picture_aspect: float = 10.0
    """Limit of the longer side in multiples of the other."""
    max_video_bytes: int = 48 << 20
    """Limit of a clip as sent."""
    max_video_pixels: int = 4096 * 2304
    """Limit of a clip's pixels a frame."""
    max_video_frames: int = 3600
    """Limit of the frames that are decoded."""
    max_video_decode_s: float = 30.0
    """Limit of the time in which all clips of a request, with their sounds, are decoded."""
    max_sound_s: float = 300.0
    """Limit of the length of a clip whose sound is kept."""
    picture_origins: tuple[str, ...] = ()
    """Beginnings of allowed URLs, such as "https://images.example.com"."""

    def decode_end_s(self) -> float:
        """Return when clips whose decoding begins now have taken too long, by the monotonic clock."""
        return time.monotonic() + self.max_video_decode_s

    def __post_init__(self) -> None:
        check_positive(self, "max_input_pictures", "max_picture_bytes", "max_picture_pixels")
        check_positive(self, "max_video_bytes", "max_video_pixels", "max_video_frames", "max_video_decode_s")
        check_positive(self, "max_sound_s")
        if self.max_picture_aspect < 1:
            raise ValueError(f"max_picture_aspect is {self.max_picture_aspect:g}; it must be at least 1")
        for origin in self.picture_origins:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"picture_origins holds {origin!r}; it must be one, such as https://images.example.com"
                )


def check_shapes(pictures: InputPictures, max_aspect: float, param: str) -> None:
    """Raise RequestError for a picture, or a clip in the size of the result, that is too long for its height or width.

    ``param`` is the field of the pictures; ``max_aspect`` 0 allows any shape.
    """
    sizes = [(param, one.width, one.height) for one in pictures.pictures]
    if (video := pictures.video) is not None:
        sizes.append(("video", video.width, video.height))
    for name, width, height in sizes:
        if max_aspect and max(width, height) > max_aspect * min(width, height):
            allowed = f"this model takes references whose longer side is at most {max_aspect:g} times the other"
            raise RequestError(f"{name} has {width}x{height} pixels; {allowed}", name)
