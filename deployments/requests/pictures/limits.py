"""How much may come along with a request."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.checks import check_positive
from deployments.requests.pictures.fetch import ORIGIN
from deployments.requests.request_errors import RequestError
from pipelines.request import InputPictures


@dataclass(frozen=True, kw_only=True)
class PictureLimits:
    """Configurable limits of input pictures and clips. It has no slots, since its section has further parents.

    A request has at most ``max_input_pictures``, each of ``max_picture_bytes`` as sent, and ``max_picture_pixels`` in
    all, its mask included. No side is longer than ``max_picture_aspect`` times the other. URLs must begin with one of
    ``picture_origins``, such as "https://images.example.com".

    A clip has at most ``max_video_bytes`` as sent and ``max_video_pixels`` a frame. At most ``max_video_frames`` are
    decoded, within ``max_video_decode_s``.
    """

    max_input_pictures: int = 16
    max_picture_bytes: int = 20 << 20
    max_picture_pixels: int = 50_000_000
    max_picture_aspect: float = 10.0
    max_video_bytes: int = 48 << 20
    max_video_pixels: int = 4096 * 2304
    max_video_frames: int = 3600
    max_video_decode_s: float = 30.0
    picture_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_positive(self, "max_input_pictures", "max_picture_bytes", "max_picture_pixels")
        check_positive(self, "max_video_bytes", "max_video_pixels", "max_video_frames", "max_video_decode_s")
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
