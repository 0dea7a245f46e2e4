"""Sizes in text form ("1024x768" in pixels, for clips "832x480x81" with frames), and those that a model allows."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_NUMBER = "[1-9][0-9]{0,4}"
PIXELS = f"{_NUMBER}x{_NUMBER}"
"""Regular expression of width and height, for API schemas."""

MAX_SIDES = {"webp": 16_383, "jpeg": 65_500, "mp4": 16_384}
"""Longest side in pixels by format (MP4: libx264's limit, JPEG: libjpeg's); PNG has no limit."""

_NOTATION = re.compile(f"({_NUMBER})x({_NUMBER})(?:x({_NUMBER}))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Size of a picture or clip, in pixels."""

    width: int
    """Pixels of a row."""
    height: int
    """Number of rows."""
    num_frames: int | None = None
    """Length of a clip; None: the model's default."""

    @classmethod
    def parse(cls, text: str) -> Size:
        """Parse "1024x768" or, for clips, "832x480x81". ValueError for anything else."""
        match = _NOTATION.fullmatch(text)
        if match is None:
            raise ValueError(f"size {text!r}: write it as WIDTHxHEIGHT in pixels, or WIDTHxHEIGHTxFRAMES")
        width, height, frames = match.groups()
        return cls(width=int(width), height=int(height), num_frames=int(frames) if frames else None)

    def __str__(self) -> str:
        numbers = (self.width, self.height, self.num_frames)
        return "x".join(str(number) for number in numbers if number is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeLimits:
    """Allowed sizes, in pixels."""

    multiple: int
    """Divisor of both sides."""
    max_pixels: float
    """Limit of the area."""
    min_side: int = 1
    """Smallest width and height."""
    max_side: float = math.inf
    """Largest width and height."""

    def check(self, width: int, height: int) -> None:
        """Raise ValueError with the allowed values for any other size."""
        given, shortest, longest = f"size is {width}x{height}", min(width, height), max(width, height)
        if 0 < shortest < self.min_side:
            raise ValueError(f"{given}; width and height must be at least {self.min_side}")
        if longest > self.max_side:
            raise ValueError(f"{given}; width and height must be at most {self.max_side}")
        if shortest <= 0 or width % self.multiple or height % self.multiple:
            allowed = f"width and height must be positive multiples of {self.multiple}"
            raise ValueError(f"{given}: {allowed}, such as {self.nearest(width, height)}")
        if width * height > self.max_pixels:
            allowed = f"at most {self.max_pixels} pixels are allowed, such as {self.nearest(width, height)}"
            raise ValueError(f"{given}, {width * height} pixels: {allowed}")

    def allows(self, size: Size) -> bool:
        """Return whether ``check`` raises no error."""
        return self.nearest(size.width, size.height) == Size(width=size.width, height=size.height)

    def nearest(self, width: float, height: float) -> Size:
        """Return the nearest multiples; if they exceed ``max_pixels``, smaller ones of about the same shape."""
        sides = [self._side(round(side / self.multiple)) for side in (width, height)]
        if sides[0] * sides[1] > self.max_pixels:
            short, long = sorted((0, 1), key=lambda index: sides[index])
            sides[short] = self._side(math.sqrt(self.max_pixels * sides[short] / sides[long]) // self.multiple)
            sides[long] = self._side(self.max_pixels / sides[short] // self.multiple)
        return Size(width=sides[0], height=sides[1])

    def _side(self, num_multiples: float) -> int:
        """Return the side of ``num_multiples``, clamped to the limits."""
        fewest, most = math.ceil(self.min_side / self.multiple), self.max_side / self.multiple
        return max(1, fewest, int(min(most, num_multiples))) * self.multiple


def check_frames(num_frames: int, multiple: int, max_frames: int | None = None) -> None:
    """Raise ValueError unless ``num_frames`` is 1 plus a multiple of ``multiple``."""
    if num_frames < 1 or (num_frames - 1) % multiple:
        near = 1 + max(0, round((num_frames - 1) / multiple)) * multiple
        if max_frames is not None:
            near = min(near, largest_num_frames(max_frames, multiple))
        raise ValueError(f"num_frames is {num_frames}; it must be 1 + a multiple of {multiple}, such as {near}")


def largest_num_frames(max_frames: int, multiple: int) -> int:
    """Return the most frames, up to ``max_frames``, that are 1 + a multiple of ``multiple``."""
    return 1 + (max_frames - 1) // multiple * multiple
