"""How large a picture or a clip is to be, in pixels: as the client says, or as the picture that came along is."""

from __future__ import annotations

import math
import re

from deployments.requests.bodies import MediaBody
from deployments.requests.errors import RequestError, blaming, shown
from pipelines.defaults import Defaults
from pipelines.request import InputPicture
from pipelines.size import PIXELS, Size


def choose_size(body: MediaBody, defaults: Defaults, first: InputPicture | None = None) -> tuple[int, int]:
    """Returns width and height in pixels, from ``size`` or the two numbers, or else from the ``first`` picture."""
    sides = (body.width, body.height)
    if body.size in (None, "", "auto") and sides == (None, None):
        return (defaults.width, defaults.height) if first is None else size_of(first, defaults)
    if body.size in (None, "", "auto"):
        width, height, param = *both_sides(*sides), "width"
    else:
        width, height, param = *parse_size(str(body.size), defaults), "size"
        if any(side not in (None, meant) for side, meant in zip(sides, (width, height), strict=True)):
            message = f"size is {body.size}, but width and height say something else; give one of them"
            raise RequestError(message, "size")
    with blaming(param):
        defaults.check_size(width, height)
    return width, height


def size_of(picture: InputPicture, defaults: Defaults) -> tuple[int, int]:
    """Returns the nearest allowed size; of a ``picture`` larger than the model's default (or smaller, where the model
    ``enlarges_pictures``) one like that: cameras give many times the pixels for which models were made."""
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
