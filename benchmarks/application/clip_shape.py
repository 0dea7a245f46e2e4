"""Shape of the clips that are asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipShape:
    """Pixels, frames and steps. 0 is the model's default."""

    width: int = 0
    height: int = 0
    num_frames: int = 0
    num_steps: int = 0

    @classmethod
    def of(cls, text: str) -> ClipShape:
        """Read 832x480x81, or 832x480x81@8 for 8 steps. ValueError for anything else."""
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?:@([1-9]\d*))?", text)
        if found is None:
            raise ValueError(f"{text!r} is no clip; write WIDTHxHEIGHTxFRAMES or WIDTHxHEIGHTxFRAMES@STEPS")
        width, height, num_frames, num_steps = (int(number or 0) for number in found.groups())
        return cls(width=width, height=height, num_frames=num_frames, num_steps=num_steps)

    def __str__(self) -> str:
        size = f"{self.width}x{self.height}x{self.num_frames}" if self.width else "default"
        return f"{size}@{self.num_steps}" if self.num_steps else size

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a request."""
        size = {"size": f"{self.width}x{self.height}", "num_frames": self.num_frames} if self.width else {}
        return size | ({"num_inference_steps": self.num_steps} if self.num_steps else {})


ANY_CLIP = ClipShape()
