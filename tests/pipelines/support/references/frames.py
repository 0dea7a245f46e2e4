"""The bare pipeline on this machine's CPU, in float32: from a request to frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from pipelines.checkpoint import Checkpoint
from pipelines.request import NO_PICTURES, InputPictures, MediaRequest
from pipelines.run import load_pipeline


def painted(path: Path, request: MediaRequest, pictures: InputPictures = NO_PICTURES) -> NDArray[Any]:
    """Return uint8 (frames, height, width, 3). Raise ValueError outside the model's limits."""
    checkpoint = Checkpoint(path)
    checkpoint.defaults.check(request)
    return load_pipeline(checkpoint).run(request, pictures)
