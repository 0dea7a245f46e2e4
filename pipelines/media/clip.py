"""Clips: H.264, and AAC where they have sound, in MP4, with PyAV (FFmpeg and libx264)."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from numpy.typing import NDArray

from pipelines.media.sound import Sound

# Without cpu-independent, libx264's fastest routines read memory that nothing wrote, and the bytes vary with it.
QUALITY = {"crf": "18", "preset": "medium", "x264-params": "cpu-independent=1"}
SOUND_QUALITY = {"b": "192k", "flags": "+bitexact"}
CONTAINER = {"movflags": "+faststart", "fflags": "+bitexact"}
"""The index goes before the frames, so that browsers play while they load; no time stamps of the encoding."""


def encode_clip(frames_FHWC: NDArray[np.uint8], fps: int, sound: Sound | None = None) -> bytes:
    """An MP4 (yuv420p, BT.709). Odd sizes gain a copy of their last row or column: 4:2:0 needs even ones.

    One thread: with several, libx264's rate control (and so the bytes) depends on timing.
    """
    if fps < 1:
        raise ValueError(f"{fps} frames per second: at least 1 is needed for a clip")
    with tempfile.TemporaryDirectory() as folder:  # moving the index to the front reads the file again
        file = Path(folder) / "clip.mp4"
        _write(file, _even(frames_FHWC), fps, sound)
        return file.read_bytes()


def _write(file: Path, frames_FHWC: NDArray[np.uint8], fps: int, sound: Sound | None) -> None:
    with av.open(str(file), "w", options=CONTAINER) as container:
        stream = _add_stream(container, frames_FHWC.shape[1:3], fps)
        sounding = () if sound is None else ((_add_sound(container, sound), _sound_frame(sound)),)
        for index, frame_HWC in enumerate(frames_FHWC):
            container.mux(stream.encode(_video_frame(frame_HWC, index)))
        container.mux(stream.encode(None))
        for track, samples in sounding:
            container.mux(track.encode(samples))
            container.mux(track.encode(None))


def _add_stream(container: Any, size: tuple[int, ...], fps: int) -> Any:
    stream = container.add_stream("libx264", rate=fps, options=QUALITY)
    stream.height, stream.width = size
    stream.pix_fmt = "yuv420p"
    context = stream.codec_context
    context.thread_count, context.time_base = 1, Fraction(1, fps)
    context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
    context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
    return stream


def _add_sound(container: Any, sound: Sound) -> Any:
    stream = container.add_stream("aac", rate=sound.rate, options=SOUND_QUALITY, layout=_layout(sound))
    stream.codec_context.thread_count, stream.codec_context.time_base = 1, Fraction(1, sound.rate)
    return stream


def _layout(sound: Sound) -> str:
    return ("mono", "stereo")[len(sound.samples_CT) - 1]


def _sound_frame(sound: Sound) -> av.AudioFrame:
    """All samples; the stream cuts them into frames of its own length."""
    samples_CT = np.ascontiguousarray(sound.samples_CT.clip(-1, 1), dtype=np.float32)
    frame = av.AudioFrame.from_ndarray(samples_CT, format="fltp", layout=_layout(sound))
    frame.sample_rate, frame.time_base, frame.pts = sound.rate, Fraction(1, sound.rate), 0
    return frame


def _video_frame(frame_HWC: NDArray[np.uint8], index: int) -> av.VideoFrame:
    rgb = av.VideoFrame.from_ndarray(frame_HWC, format="rgb24")
    frame = rgb.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG)
    frame.pts = index
    return frame


def _even(frames_FHWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    _, height, width, _ = frames_FHWC.shape
    padded: NDArray[np.uint8] = np.pad(frames_FHWC, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(padded)
