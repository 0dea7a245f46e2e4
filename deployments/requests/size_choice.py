"""Size and length of a result: those of the body, of the inputs, or of the model.

``pipelines.defaults.Defaults.checks`` compares them with what the model allows.
"""

from __future__ import annotations

import math
import re
from typing import Protocol, TypeGuard

from deployments.requests.bodies import MediaBody, VideoBody
from deployments.requests.request_errors import RequestError, shown
from pipelines.defaults import Defaults
from pipelines.request import InputVideo, MediaRequest
from pipelines.size import PIXELS, Size, largest_num_frames
from pipelines.wording import decimal


class HasSize(Protocol):
    """A picture, a clip, or the head of one."""

    @property
    def width(self) -> int: ...

    @property
    def height(self) -> int: ...


def has_size(body: MediaBody) -> bool:
    """Return whether ``size`` of ``body`` names a size."""
    return body.size not in (None, "", "auto")


def choose_size(body: MediaBody, defaults: Defaults, first: HasSize | None = None) -> tuple[int, int]:
    """Return width and height in pixels, from ``size`` or the two numbers, or else from the input ``first``."""
    sides = (body.width, body.height)
    if has_size(body):
        size = parse_size(str(body.size), defaults)
        if any(side not in (None, given) for side, given in zip(sides, size, strict=True)):
            message = f"size is {body.size}, but width and height say something else; give one of them"
            raise RequestError(message, "size")
        return size
    if sides != (None, None):
        return both_sides(*sides)
    if isinstance(body, VideoBody) and body.second_stage_sigmas and defaults.stage_scale:
        defaults = defaults.enlarged
    return (defaults.width, defaults.height) if first is None else size_of(first, defaults)


def size_of(picture: HasSize, defaults: Defaults) -> tuple[int, int]:
    """Return the allowed size that is nearest to the size of ``picture``.

    A picture larger than the model's default is scaled down to it, since cameras have far more pixels than models are
    made for. If the model ``enlarges_pictures``, a smaller one is scaled up.
    """
    excess = picture.width * picture.height / (defaults.width * defaults.height)
    scale = 1 / math.sqrt(excess if defaults.enlarges_pictures else max(1.0, excess))
    nearest = defaults.nearest_size(scale * picture.width, scale * picture.height)
    return nearest.width, nearest.height


def both_sides(width: int | None, height: int | None) -> tuple[int, int]:
    if width is None or height is None:
        alone, other = ("width", "height") if height is None else ("height", "width")
        raise RequestError(f"{alone} is given without {other}; give both, or size", alone)
    return width, height


def parse_size(text: str, defaults: Defaults) -> tuple[int, int]:
    if not re.fullmatch(PIXELS, text):
        example = f"{defaults.width}x{defaults.height}"
        message = f"size is {shown(text)}: it must be WIDTHxHEIGHT in pixels, such as {example}, or auto"
        raise RequestError(message, "size")
    size = Size.parse(text)
    return size.width, size.height


def choose_length(body: MediaBody, defaults: Defaults, video: InputVideo | None = None) -> tuple[int, int]:
    """Return frames and frames per second; 1 and 0 of a picture. A model may keep the length of ``video``."""
    if not isinstance(body, VideoBody):
        return 1, 0
    for name in ("n", "num_outputs_per_prompt"):
        if getattr(body, name) not in (None, 1):
            message = f"{name} is {getattr(body, name)}; a request makes one clip: send it once for each"
            raise RequestError(message, name)
    num_frames, fps = clip_length(body.seconds, body.num_frames, body.fps, defaults)
    if video is None or not defaults.keeps_length:
        return num_frames, fps
    check_length(body, num_frames, video)
    return video.num_frames, fps


def clip_length(seconds: float | None, num_frames: int | None, fps: int | None, defaults: Defaults) -> tuple[int, int]:
    """Return frames and frames per second.

    ``seconds`` become the nearest number of frames that is 1 + a multiple of ``frame_multiple``.
    """
    if seconds is not None and num_frames is not None:
        raise RequestError("seconds and num_frames exclude each other; give one of them", "seconds")
    rate = fps or defaults.fps
    if seconds is None:
        return defaults.num_frames if num_frames is None else num_frames, rate
    length = seconds * rate
    frames = 1 + max(0, round((length - 1) / defaults.frame_multiple)) * defaults.frame_multiple
    if length <= 0 or not defaults.min_frames <= frames <= defaults.max_frames:
        least = "above 0" if defaults.min_frames == 1 else f"at least {decimal(defaults.min_frames / rate)}"
        message = f"seconds is {seconds:g}; at {rate} fps it must be {least} and at most {longest(rate, defaults)}"
        raise RequestError(message, "seconds")
    return frames, rate


def asks_for_length(body: MediaBody) -> TypeGuard[VideoBody]:
    return isinstance(body, VideoBody) and (body.seconds, body.num_frames) != (None, None)


def check_length(body: MediaBody, num_frames: int, video: InputVideo) -> None:
    """Raise RequestError if ``body`` asks for ``num_frames``, more than its clip has."""
    if asks_for_length(body) and num_frames > video.num_frames:
        name = "num_frames" if body.seconds is None else "seconds"
        given = f"{name} is {getattr(body, name):g}, which is {num_frames} frames at {video.fps} fps"
        raise RequestError(f"{given}, and video has {video.num_frames}; leave it out, or make it smaller", name)


def longest(rate: int, defaults: Defaults) -> str:
    """Return the duration of the longest clip in seconds, rounded down so that it is allowed itself."""
    return decimal(math.floor(1000 * largest_num_frames(defaults.max_frames, defaults.frame_multiple) / rate) / 1000)


def clip_seconds(request: MediaRequest) -> str:
    """Return the duration of a clip, which may differ from the ``seconds`` of its body."""
    return decimal(request.num_frames / request.fps)
