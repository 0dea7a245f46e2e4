"""Sizes as people write them: "1024x768" in pixels, and for clips "832x480x81" with the number of frames."""

from __future__ import annotations

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
