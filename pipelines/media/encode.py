"""Choice of the encoder by format: PNG, JPEG and WebP in `picture.py`, MP4 in `clip.py`; thumbnails."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipelines.media.metadata import NO_TEXTS, Texts
from pipelines.media.picture import FORMATS, encode_picture, shrink
from pipelines.media.sound import Sound

Frames = NDArray[np.uint8]
MAX_GROUPS = 16
"""Groups of pictures of a clip encoded concurrently. A clip of 189 frames has as many; one of 121 has 11."""
THUMBNAIL_SIDE = 320
THUMBNAIL_COMPRESSION = 80


def encode_frames(
    frames_FHWC: Frames,
    format: Literal["png", "jpeg", "webp", "mp4"],
    *,
    compression: int = 100,
    fps: int = 0,
    sound: Sound | None = None,
    texts: Texts = NO_TEXTS,
) -> bytes:
    """Return the bytes of a picture (one frame) or clip from uint8 frames (frames, height, width, 3).

    A PNG or WebP may have a fourth channel, its opacity. ``compression`` is 0–100 as in OpenAI's API: the quality of a
    JPEG or WebP; PNG is lossless. Clips may have ``sound``. ``texts`` are stored in the file, by keyword
    (``pipelines.media.metadata``). ValueError for several frames in a picture format, JPEG with opacity, mp4 with
    ``fps`` below 1, and unknown formats.
    """
    check_frames(frames_FHWC, num_channels=(3,) if format == "mp4" else (3, 4))
    if format == "mp4":
        from pipelines.media.clip import encode_clip

        return encode_clip(frames_FHWC, fps, sound, texts=texts)
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; known: {', '.join(FORMATS)}, mp4")
    if len(frames_FHWC) != 1:
        raise ValueError(f"{format} holds one frame, not {len(frames_FHWC)}; use mp4")
    return encode_picture(frames_FHWC[0], format, compression, texts)


def encode_thumbnail(frame_HWC: Frames) -> bytes:
    """Return a WebP of at most 320 pixels on its longer side, in the same ratio."""
    return encode_picture(shrink(frame_HWC, THUMBNAIL_SIDE), "webp", THUMBNAIL_COMPRESSION)


def check_frames(frames_FHWC: Frames, num_channels: Collection[int] = (3,)) -> None:
    assert frames_FHWC.dtype == np.uint8, frames_FHWC.dtype
    assert frames_FHWC.ndim == 4, frames_FHWC.shape
    assert frames_FHWC.shape[0] > 0, "no frames"
    assert frames_FHWC.shape[3] in num_channels, frames_FHWC.shape
