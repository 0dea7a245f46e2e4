"""Pictures: PNG in strips, all else with Pillow."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipelines.media.metadata import MAX_JPEG_EXIF_BYTES, NO_TEXTS, Texts, exif_of, png_chunks
from pipelines.media.png import encode_png

FORMATS = ("png", "jpeg", "webp")
WITH_OPACITY = ("png", "webp")


def encode_picture(frame_HWC: NDArray[np.uint8], format: str, compression: int, texts: Texts = NO_TEXTS) -> bytes:
    """Bytes of one frame; ``compression`` 0–100 is the quality that JPEG and WebP keep. ``texts`` go along.

    A fourth channel is opacity: ValueError for a format that has none.
    """
    if frame_HWC.shape[-1] == 4 and format not in WITH_OPACITY:
        raise ValueError(f"{format} has no opacity; use {' or '.join(WITH_OPACITY)}")
    if not 0 <= compression <= 100:
        raise ValueError(f"compression {compression}: 0 to 100 is allowed")
    if format == "png":
        return encode_png(frame_HWC, png_chunks(texts))
    exif = exif_of(texts, MAX_JPEG_EXIF_BYTES) if format == "jpeg" else exif_of(texts)
    buffer = io.BytesIO()
    Image.fromarray(frame_HWC).save(buffer, format=format, quality=compression, exif=exif)
    return buffer.getvalue()


def laid_over_white(layers_FHWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """One opaque picture: what ``layers_FHWC`` with opacity show together, each over those before it, on white."""
    _, height, width, _ = layers_FHWC.shape
    ground = Image.new("RGBA", (width, height), "white")
    for layer_HWC in layers_FHWC:
        ground.alpha_composite(Image.fromarray(layer_HWC))
    return np.asarray(ground.convert("RGB"))


def shrink(frame_HWC: NDArray[np.uint8], longest_side: int) -> NDArray[np.uint8]:
    """The frame, made smaller (never larger) until its longer side is at most ``longest_side`` pixels."""
    picture = Image.fromarray(frame_HWC)
    picture.thumbnail((longest_side, longest_side), Image.Resampling.LANCZOS)
    return np.asarray(picture)
