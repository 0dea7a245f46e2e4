"""Decoding of the sound of untrusted clips, with PyAV (FFmpeg), in a second pass over the file."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deployments.requests.pictures.limits import PictureLimits
from deployments.requests.request_errors import RequestError
from pipelines.request import InputSound

if TYPE_CHECKING:
    import av

COMPRESSED = ("aac", "mp3float", "mp3", "opus", "libopus", "vorbis", "libvorbis", "flac", "alac", "ac3")
PLAIN = ("pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_f32le", "pcm_u8")
DECODERS = (*COMPRESSED, *PLAIN)
OPTIONS = {"codec_whitelist": ",".join(DECODERS), "protocol_whitelist": "none"}
MIN_RATE, MAX_RATE = 8_000, 192_000
MAX_CHANNELS = 8
MAX_BLOCK_SAMPLES = 1 << 20
"""Most samples a channel of one decoded frame. Encoders write some thousands."""
LAYOUTS = {1: "mono", 2: "stereo"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundForm:
    """The part of a clip's sound that a request needs."""

    rate: int
    """Samples a second."""
    start_s: float
    """When the first frame is shown, by the file's clock."""
    duration_s: float
    """Length of the frames."""


def read_sound(data: bytes, container: str, param: str, limits: PictureLimits, form: SoundForm) -> InputSound | None:
    """Return the sound beside the frames, mono or stereo; None without one.

    It begins with silence if the file's sound begins later. FFmpeg resamples it, and mixes further channels into two.
    RequestError for a format that is not read, and above a limit; av.FFmpegError for a broken stream.
    """
    import av

    if form.duration_s > limits.max_sound_s:
        message = f"{param} is {form.duration_s:.4g} s long; with keep_audio it may have {limits.max_sound_s:g} s"
        raise RequestError(message, param, code="video_too_large")
    with av.open(io.BytesIO(data), "r", format=container, options=OPTIONS) as opened:
        stream: Any = opened.streams.best("audio")
        if stream is None:
            return None
        _check(stream.codec_context, param)
        num_samples = round(form.duration_s * form.rate)
        pieces = list(_pieces(opened, stream, param, limits, form, num_samples))
    samples_CT = np.concatenate(pieces, axis=1)[:, :num_samples] if pieces else np.empty((1, 0), np.float32)
    if not samples_CT.shape[1]:
        return None
    samples_CT = np.ascontiguousarray(samples_CT, dtype=np.float32)
    return InputSound(num_channels=len(samples_CT), rate=form.rate, data=samples_CT.tobytes())


def _check(context: Any, param: str) -> None:
    fault = ""
    if context.name not in DECODERS:
        fault = f"is in the format {context.name}, which is not read here; send it in AAC, MP3, Opus or FLAC"
    elif not MIN_RATE <= context.sample_rate <= MAX_RATE:
        fault = f"has {context.sample_rate} samples a second; it must have from {MIN_RATE} to {MAX_RATE}"
    elif not 1 <= context.layout.nb_channels <= MAX_CHANNELS:
        fault = f"has {context.layout.nb_channels} channels; it must have from 1 to {MAX_CHANNELS}"
    if fault:
        raise RequestError(f"the sound of {param} {fault}, or leave keep_audio out", param, code="bad_video")


def _pieces(
    opened: Any, stream: Any, param: str, limits: PictureLimits, form: SoundForm, num_samples: int
) -> Iterator[NDArray[np.float32]]:
    """Yield samples, (channels, samples) each, from ``start_s`` on, until there are at least ``num_samples``."""
    import av

    layout = LAYOUTS[min(2, stream.codec_context.layout.nb_channels)]
    resampler = av.AudioResampler(format="fltp", layout=layout, rate=form.rate)
    num_left, num_before = num_samples, None
    for frame in _frames(opened, stream, param, limits):
        if num_before is None and frame is None:
            return
        if num_before is None:  # samples before the first frame of the clip; negative: it begins later
            num_before = round((form.start_s - _start_s(frame)) * form.rate)
            if num_before < 0:
                yield np.zeros((1 if layout == "mono" else 2, min(-num_before, num_left)), np.float32)
                num_left += num_before
        for resampled in resampler.resample(frame):
            samples_CT = _samples(resampled)
            skipped = min(max(0, num_before), samples_CT.shape[1])
            num_before -= skipped
            num_left -= samples_CT.shape[1] - skipped
            if skipped < samples_CT.shape[1]:  # an empty view would hold the memory of all samples
                yield samples_CT[:, skipped:]
        if num_left <= 0:
            return


def _samples(frame: av.AudioFrame) -> NDArray[np.float32]:
    return frame.to_ndarray().astype(np.float32, copy=False)


def _start_s(frame: av.AudioFrame | None) -> float:
    return 0.0 if frame is None or frame.pts is None or frame.time_base is None else float(frame.pts * frame.time_base)


def _frames(opened: Any, stream: Any, param: str, limits: PictureLimits) -> Iterator[av.AudioFrame | None]:
    """Yield the decoded frames, and None at their end."""
    import av

    end_s = time.monotonic() + limits.max_video_decode_s
    stream.codec_context.thread_count = 1
    for packet in opened.demux(stream):
        if time.monotonic() > end_s:
            message = f"the sound of {param} is not decoded after {limits.max_video_decode_s:g} s: make it shorter"
            raise RequestError(message, param, code="video_too_large")
        if packet.is_corrupt:
            raise RequestError(f"the sound of {param} is broken; send a file that is whole", param, code="bad_video")
        with suppress(av.EOFError):
            for frame in stream.codec_context.decode(packet):
                _check_block(frame, param)
                yield frame
    yield None


def _check_block(frame: av.AudioFrame, param: str) -> None:
    """Raise RequestError for a frame whose resampled samples would take much more memory than the file."""
    if frame.samples > MAX_BLOCK_SAMPLES:
        message = f"the sound of {param} has a block of {frame.samples} samples; it may have {MAX_BLOCK_SAMPLES}"
        raise RequestError(f"{message}: export it anew, or leave keep_audio out", param, code="bad_video")
