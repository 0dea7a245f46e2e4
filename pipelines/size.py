"""Sizes as people write them: "1024x768" in pixels, and for clips "832x480x81" with the number of frames."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_NUMBER = "[1-9][0-9]{0,4}"
PIXELS = f"{_NUMBER}x{_NUMBER}"
"""The notation of width and height as a regular expression, for whoever states it to others."""

_NOTATION = re.compile(f"({_NUMBER})x({_NUMBER})(?:x({_NUMBER}))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Width and height in pixels; None frames are the model's default number."""

    width: int
    height: int
    num_frames: int | None = None

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read "1024x768" or, for clips, "832x480x81". ValueError for anything else."""
        match = _NOTATION.fullmatch(text)
        if match is None:
            raise ValueError(f"size {text!r}: write it as WIDTHxHEIGHT in pixels, or WIDTHxHEIGHTxFRAMES")
        width, height, frames = match.groups()
        return cls(width=int(width), height=int(height), num_frames=int(frames) if frames else None)

    def __str__(self) -> str:
        numbers = (self.width, self.height, self.num_frames)
        return "x".join(str(number) for number in numbers if number is not None)


def check_sides(width: int, height: int, multiple: int, max_pixels: float = math.inf) -> None:
    """ValueError unless both are positive multiples of ``multiple``. What it suggests has ``max_pixels`` at most."""
    if min(width, height) <= 0 or width % multiple or height % multiple:
        near = nearest_size(width, height, multiple, max_pixels)
        raise ValueError(
            f"size is {width}x{height}: width and height must be positive multiples of {multiple}, such as {near}"
        )


def nearest_size(width: float, height: float, multiple: int, max_pixels: float) -> Size:
    """Returns the nearest multiples; where these have too many pixels, smaller ones of about the same shape."""
    sides = [max(1, round(side / multiple)) * multiple for side in (width, height)]
    if sides[0] * sides[1] > max_pixels:
        short, long = sorted((0, 1), key=lambda index: sides[index])
        sides[short] = _floor(math.sqrt(max_pixels * sides[short] / sides[long]), multiple)
        sides[long] = _floor(max_pixels / sides[short], multiple)
    return Size(width=sides[0], height=sides[1])


def _floor(side: float, multiple: int) -> int:
    return max(1, int(side) // multiple) * multiple
