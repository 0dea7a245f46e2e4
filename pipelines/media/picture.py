"""Pictures, with Pillow."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

FORMATS = ("png", "jpeg", "webp")
PNG_LEVEL = 3
"""zlib's level: clearly faster than the default 6, for files that are about a tenth larger."""


def encode_picture(frame_HWC: NDArray[np.uint8], format: str, compression: int) -> bytes:
    """Bytes of one frame; ``compression`` 0–100 is the quality that JPEG and WebP keep."""
    if not 0 <= compression <= 100:
        raise ValueError(f"compression {compression}: 0 to 100 is allowed")
    options = {"compress_level": PNG_LEVEL} if format == "png" else {"quality": compression}
    buffer = io.BytesIO()
    Image.fromarray(frame_HWC).save(buffer, format=format, **options)
    return buffer.getvalue()


def shrink(frame_HWC: NDArray[np.uint8], longest_side: int) -> NDArray[np.uint8]:
    """The frame, made smaller (never larger) until its longer side is at most ``longest_side`` pixels."""
    picture = Image.fromarray(frame_HWC)
    picture.thumbnail((longest_side, longest_side), Image.Resampling.LANCZOS)
    return np.asarray(picture)
