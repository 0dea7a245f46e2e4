"""Decoding of the sound of untrusted clips, with PyAV (FFmpeg), in a second pass over the file."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
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
MAX_SAMPLE = 8.0
"""Decoders of loud lossy sounds exceed 1 a little; samples written as floats may be anything."""
LAYOUTS = {1: "mono", 2: "stereo"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundForm:
    """The part of a clip's sound that a request needs."""

    rate: int
    """Samples a second."""
    start_s: float
    """Time of the first frame, by the file's clock."""
    duration_s: float
    """Length of the frames."""


def read_sound(
    data: bytes, container: str, param: str, limits: PictureLimits, form: SoundForm, end_s: float
) -> InputSound | None:
    """Return the sound beside the frames, mono or stereo; None without one.

    It begins with silence if the file's sound begins later. FFmpeg resamples it, and mixes further channels into two.
    RequestError for an unsupported format, above a limit, and if it is not decoded at ``end_s`` (of the monotonic
    clock). av.FFmpegError for a broken stream.
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
        pieces = list(_pieces(_frames(opened, stream, param, limits, end_s), stream, form, num_samples))
    samples_CT = np.concatenate(pieces, axis=1)[:, :num_samples] if pieces else np.empty((1, 0), np.float32)
    if not samples_CT.shape[1]:
        return None
    samples_CT = np.ascontiguousarray(samples_CT, dtype=np.float32)
    if not np.abs(samples_CT).max() <= MAX_SAMPLE:  # NaN is not either
        raise _refusal(f"has samples that are no numbers, or beyond {MAX_SAMPLE:g}; export it anew", param)
    return InputSound(num_channels=len(samples_CT), rate=form.rate, data=samples_CT.tobytes())


def _check(context: Any, param: str) -> None:
    if context.name not in DECODERS:
        fault = f"is in the format {context.name}, which is not read here; send it in AAC, MP3, Opus or FLAC"
        raise _refusal(fault, param)
    _check_form(context, param)


def _check_form(one: Any, param: str) -> None:
    """Raise RequestError for a rate or channels of a stream, or of one of its frames, that are not allowed."""
    if not MIN_RATE <= one.sample_rate <= MAX_RATE:
        raise _refusal(f"has {one.sample_rate} samples a second; it must have from {MIN_RATE} to {MAX_RATE}", param)
    if not 1 <= one.layout.nb_channels <= MAX_CHANNELS:
        raise _refusal(f"has {one.layout.nb_channels} channels; it must have from 1 to {MAX_CHANNELS}", param)


def _refusal(fault: str, param: str) -> RequestError:
    return RequestError(f"the sound of {param} {fault}, or leave keep_audio out", param, code="bad_video")


def _pieces(
    frames: Iterator[av.AudioFrame | None], stream: Any, form: SoundForm, num_samples: int
) -> Iterator[NDArray[np.float32]]:
    """Yield samples, (channels, samples) each, from ``start_s`` on, until there are at least ``num_samples``.

    No further one of ``frames`` is decoded then.
    """
    first = next(frames)
    if first is None:
        return
    num_channels = min(2, max(stream.codec_context.layout.nb_channels, first.layout.nb_channels))
    resampler = _Resampler(LAYOUTS[num_channels], form.rate)
    num_left = num_samples
    num_before = round((form.start_s - _start_s(first)) * form.rate)  # negative: the sound begins after the clip
    if num_before < 0:
        yield np.zeros((num_channels, min(-num_before, num_left)), np.float32)
        num_left += num_before
    for frame in chain([first], frames):
        for samples_CT in resampler.resample(frame):
            skipped = min(max(0, num_before), samples_CT.shape[1])
            num_before -= skipped
            num_left -= samples_CT.shape[1] - skipped
            if skipped < samples_CT.shape[1]:  # an empty view would hold the memory of all samples
                yield samples_CT[:, skipped:]
        if num_left <= 0:
            return


class _Resampler:
    """Resamples frames to one layout and rate. Their own may change: MP3 and AAC may say another one in each frame."""

    def __init__(self, layout: str, rate: int) -> None:
        self._layout, self._rate = layout, rate
        self._form: tuple[str, str, int] | None = None
        self._resampler: av.AudioResampler | None = None

    def resample(self, frame: av.AudioFrame | None) -> Iterator[NDArray[np.float32]]:
        """Yield samples, (channels, samples) each; those that are left at the end, which is None."""
        import av

        form = None if frame is None else (frame.format.name, frame.layout.name, frame.sample_rate)
        if form != self._form:
            yield from self._resampled(None)
            self._resampler = av.AudioResampler(format="fltp", layout=self._layout, rate=self._rate)
            self._form = form
        if frame is not None:
            yield from self._resampled(frame)

    def _resampled(self, frame: av.AudioFrame | None) -> Iterator[NDArray[np.float32]]:
        for one in () if self._form is None or self._resampler is None else self._resampler.resample(frame):
            yield one.to_ndarray().astype(np.float32, copy=False)


def _start_s(frame: av.AudioFrame) -> float:
    return 0.0 if frame.pts is None or frame.time_base is None else float(frame.pts * frame.time_base)


def _frames(
    opened: Any, stream: Any, param: str, limits: PictureLimits, end_s: float
) -> Iterator[av.AudioFrame | None]:
    """Yield the decoded frames, and None at their end."""
    import av

    stream.codec_context.thread_count = 1
    for packet in opened.demux(stream):
        if time.monotonic() > end_s:
            message = f"the sound of {param} is not decoded after {limits.max_video_decode_s:g} s: make it shorter"
            raise RequestError(message, param, code="video_too_large")
        if packet.is_corrupt:
            raise RequestError(f"the sound of {param} is broken; send a file that is whole", param, code="bad_video")
        with suppress(av.EOFError):
            for frame in stream.codec_context.decode(packet):
                _check_frame(frame, param)
                yield frame
    yield None


def _check_frame(frame: av.AudioFrame, param: str) -> None:
    """Raise RequestError for a frame whose resampled samples would take much more memory than the file."""
    _check_form(frame, param)
    if frame.samples > MAX_BLOCK_SAMPLES:
        fault = f"has a block of {frame.samples} samples; it may have {MAX_BLOCK_SAMPLES}: export it anew"
        raise _refusal(fault, param)
