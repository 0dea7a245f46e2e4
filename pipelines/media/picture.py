"""Pictures: PNG (https://www.w3.org/TR/png-3/) in strips of rows, JPEG and WebP with Pillow.

Compression takes most of the time of a PNG, and no library uses several threads for it. Here strips are compressed in
parallel: each is a run of deflate blocks, and together they are one zlib stream (RFC 1950), as in pigz.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipelines.media.metadata import MAX_JPEG_EXIF_BYTES, NO_TEXTS, Texts, exif_of, png_chunks

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
"""PNG colour type by number of channels: grey, RGB and RGBA."""
BIT_DEPTH = 8
SUB = 1
"""PNG filter "Sub": each value becomes its difference from the pixel to the left."""
STRIP_BYTES = 2**18
"""Size of a strip's filtered rows; independent of the number of threads, so that the file's bytes are too."""
ZLIB_HEADER = b"\x78\x01"
MEMORY_LEVEL = 9


MAX_THREADS = 8


Chunks = Sequence[tuple[bytes, bytes]]


def encode_png(frame_HWC: NDArray[np.uint8], chunks: Chunks = ()) -> bytes:
    """Return a PNG, with ``chunks`` (type and content) before the pixels. ValueError unless 1, 3 or 4 channels.

    Differences of neighbours are encoded as runs (``Z_RLE``). This is six times as fast as all filters and a search
    for matches, and files of painted pictures are no larger.
    """
    height, width, num_channels = frame_HWC.shape
    if num_channels not in COLOUR_TYPES:
        raise ValueError(f"a picture of {num_channels} channels; 1 (grey), 3 (RGB) or 4 (RGBA) are allowed")
    rows_per_strip = max(1, STRIP_BYTES // (width * num_channels + 1))
    strips = [frame_HWC[first : first + rows_per_strip] for first in range(0, height, rows_per_strip)]
    is_last = [number == len(strips) - 1 for number in range(len(strips))]
    parts = list((_threads().map if len(strips) > 1 else map)(_strip, strips, is_last))
    header = struct.pack(">IIBBBBB", width, height, BIT_DEPTH, COLOUR_TYPES[num_channels], 0, 0, 0)
    further = (part for kind, content in chunks for part in _chunk(kind, content))
    return b"".join([SIGNATURE, *_chunk(b"IHDR", header), *further, *_data(parts), *_chunk(b"IEND", b"")])


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the process's threads for strips: zlib releases the GIL."""
    return ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="strips")


def _strip(rows_HWC: NDArray[np.uint8], is_last: bool) -> tuple[memoryview, bytes]:
    """Return the filtered rows, each after the filter's number, and their compressed bytes."""
    height, width, num_channels = rows_HWC.shape
    filtered = np.empty((height, 1 + width * num_channels), np.uint8)
    filtered[:, 0] = SUB
    pixels = filtered[:, 1:].reshape(height, width, num_channels)
    pixels[:, 0] = rows_HWC[:, 0]
    np.subtract(rows_HWC[:, 1:], rows_HWC[:, :-1], out=pixels[:, 1:])
    plain = filtered.data
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, MEMORY_LEVEL, zlib.Z_RLE)
    return plain, packer.compress(plain) + packer.flush(zlib.Z_FINISH if is_last else zlib.Z_FULL_FLUSH)


def _data(parts: list[tuple[memoryview, bytes]]) -> Iterator[bytes]:
    check = 1
    for number, (plain, packed) in enumerate(parts):
        check = zlib.adler32(plain, check)
        yield from _chunk(b"IDAT", packed if number else ZLIB_HEADER + packed)
    yield from _chunk(b"IDAT", struct.pack(">I", check))


def _chunk(kind: bytes, content: bytes) -> Iterator[bytes]:
    yield struct.pack(">I", len(content))
    yield kind
    yield content
    yield struct.pack(">I", zlib.crc32(content, zlib.crc32(kind)))


FORMATS = ("png", "jpeg", "webp")
WITH_OPACITY = ("png", "webp")


def encode_picture(frame_HWC: NDArray[np.uint8], format: str, compression: int, texts: Texts = NO_TEXTS) -> bytes:
    """Return the bytes of one frame with ``texts``; ``compression`` 0–100 is the quality of JPEG and WebP.

    A fourth channel is opacity: ValueError for a format without it.
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
    """Return one opaque picture: ``layers_FHWC`` with opacity, composed in order over white."""
    _, height, width, _ = layers_FHWC.shape
    ground = Image.new("RGBA", (width, height), "white")
    for layer_HWC in layers_FHWC:
        ground.alpha_composite(Image.fromarray(layer_HWC))
    return np.asarray(ground.convert("RGB"))


def shrink(frame_HWC: NDArray[np.uint8], longest_side: int) -> NDArray[np.uint8]:
    """Return the frame, reduced if its longer side has more than ``longest_side`` pixels."""
    picture = Image.fromarray(frame_HWC)
    picture.thumbnail((longest_side, longest_side), Image.Resampling.LANCZOS)
    return np.asarray(picture)
