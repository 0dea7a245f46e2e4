"""From the body of a clip's request to what the studio is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from deployments.requests.bodies import VideoBody
from deployments.requests.cards import choose_card
from deployments.requests.errors import RequestError, blaming
from deployments.requests.rules import media_request, needs_of
from deployments.studio.interface import ModelCard
from pipelines.defaults import Defaults, largest_num_frames
from pipelines.request import NO_PICTURES, InputPictures, MediaRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipRequest:
    """One clip, what it begins with, and its real length in decimal seconds, which need not be what was asked for."""

    request: MediaRequest
    pictures: InputPictures
    seconds: str


def clip_request(
    body: VideoBody,
    cards: Mapping[str, ModelCard],
    request_id: str,
    num_previews: int,
    pictures: InputPictures = NO_PICTURES,
) -> ClipRequest:
    """Returns what ``body`` asks for. RequestError if a value does not suit the model or another value.

    ``pictures`` are those that came along.
    """
    card = choose_card(cards, body.model, "video", needs_of(body))
    check_one(body)
    num_frames, fps = clip_length(body.seconds, body.num_frames, body.fps, card.defaults)
    request = media_request(body, card, request_id, pictures, num_frames=num_frames, fps=fps, num_previews=num_previews)
    return ClipRequest(request=request, pictures=pictures, seconds=decimal(num_frames / fps))


def check_one(body: VideoBody) -> None:
    for name in ("n", "num_outputs_per_prompt"):
        if getattr(body, name) not in (None, 1):
            message = f"{name} is {getattr(body, name)}; a request makes one clip: send it once for each"
            raise RequestError(message, name)


def clip_length(seconds: float | None, num_frames: int | None, fps: int | None, defaults: Defaults) -> tuple[int, int]:
    """Returns frames and frames per second.

    A clip has 1 + k × ``frame_multiple`` frames; ``seconds`` takes the nearest.
    """
    if seconds is not None and num_frames is not None:
        raise RequestError("seconds and num_frames are two ways to say one thing; give one of them", "seconds")
    rate = fps or defaults.fps
    if seconds is None:
        return check_num_frames(defaults.num_frames if num_frames is None else num_frames, defaults), rate
    length = seconds * rate
    frames = 1 + max(0, round((length - 1) / defaults.frame_multiple)) * defaults.frame_multiple
    if length <= 0 or not defaults.min_frames <= frames <= defaults.max_frames:
        least = "above 0" if defaults.min_frames == 1 else f"at least {decimal(defaults.min_frames / rate)}"
        message = f"seconds is {seconds:g}; at {rate} fps it must be {least} and at most {longest(rate, defaults)}"
        raise RequestError(message, "seconds")
    return frames, rate


def longest(rate: int, defaults: Defaults) -> str:
    """Returns the seconds that the most frames last, rounded down so that they are not refused in turn."""
    return decimal(math.floor(1000 * largest_num_frames(defaults.max_frames, defaults.frame_multiple) / rate) / 1000)


def check_num_frames(num_frames: int, defaults: Defaults) -> int:
    with blaming("num_frames"):
        defaults.check_num_frames(num_frames)
    return num_frames


def decimal(seconds: float) -> str:
    """Returns at most three decimals, without zeros at the end."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".")
