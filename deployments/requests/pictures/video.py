"""Decoding of untrusted clips to frames, with PyAV (FFmpeg). Sound is dropped unless a request keeps it.

FFmpeg may open one container, known by its first bytes, with a few decoders and no protocol. So a clip cannot refer to
other files. Frames that a request does not need are decoded, but neither converted nor stored. FFmpeg allocates memory
for all frames that the index of an MP4 declares, so that number is checked before it opens the file.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from deployments.requests.pictures.limits import PictureLimits
from deployments.requests.pictures.sound import SoundForm, read_sound
from deployments.requests.request_errors import RequestError
from pipelines.request import InputPicture, InputPictures, InputVideo

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from PIL.Image import Image

KINDS = "an MP4, MOV, WebM or GIF file"
MOV_ATOMS = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
EBML, GIF = b"\x1aE\xdf\xa3", b"GIF8"
GIF_END, GIF_TAIL = b"\0;", 1024
"""The end of a GIF's last block and its trailer, and the bytes of a file's end in which they are; FFmpeg needs none."""
DECODERS = ("h264", "hevc", "av1", "libdav1d", "vp8", "vp9", "libvpx", "libvpx-vp9", "mpeg4", "mjpeg", "prores", "gif")
OPTIONS = {"codec_whitelist": ",".join(DECODERS), "protocol_whitelist": "none"}
WITH_OPACITY = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""Decoders that read the opacity of WebM; FFmpeg's own ignore it."""
UNUSED_BOXES = re.compile(rb"cmov|iinf|iloc|mfra|saiz|senc|sidx|pssh|udta|meta|keys|ilst|----")
"""Types of boxes that no clip needs: compressed indices, indices of indices, items, encryption and texts.

FFmpeg compares each text with all others, which takes hours for some megabytes of them."""
UNUSED_ELEMENTS = (b"\x67\xc8", b"\x73\xc4", b"\x73\x73", b"\x61\xa7")
"""Ids of texts (SimpleTag), chapters (ChapterUID), groups of texts (Tag) and attachments in WebM (RFC 9559)."""
MAX_ELEMENTS, BYTES_AN_ELEMENT = 4096, 1 << 14
"""Most of each kind: so many, and one for this many bytes. Pixels look like one in each 65536 bytes."""
COUNTS = {b"stsz": 8, b"stz2": 8, b"trun": 4, b"elst": 4}
"""Bytes between the type of a box with samples or edits and their number (ISO/IEC 14496-12)."""
MAX_SAMPLES = 1 << 23
"""Samples of all tracks, times the edits of one. FFmpeg takes about 40 bytes for each."""
MIN_SHARE, SLACK_S = 0.9, 0.25
"""A file whose frames end earlier than this share of its duration is cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoHead:
    """Size of a clip's frames, upright and with square pixels."""

    width: int
    """Pixels of a row."""
    height: int
    """Rows of a frame."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoForm:
    """The form of a clip that a request needs."""

    width: int
    """Pixels of a row."""
    height: int
    """Rows of a frame."""
    fps: int
    """Frames a second."""
    max_frames: int
    """Longest clip."""
    is_cut: bool = False
    """Leave out frames beyond ``max_frames``; otherwise they are an error."""
    frame_multiple: int = 1
    """Keep 1 + a multiple of this many frames."""
    min_frames: int = 1
    """Keep all frames of a shorter clip, which is refused later."""
    is_whole: bool = False
    """Show whole frames, in the middle of black ones; otherwise they are cropped."""
    sound_rate: int = 0
    """Samples a second of its sound; 0: the sound is dropped."""


FormOf = Callable[[VideoHead], VideoForm]
FormBeside = Callable[[VideoHead, InputPictures], VideoForm]
"""Chooses the form of a clip by its head, and by the input pictures beside it."""


def is_clip(data: bytes) -> bool:
    """Return whether a file is a clip, by its first bytes."""
    return data[4:8] in MOV_ATOMS or data.startswith((EBML, GIF))


def read_video(
    data: bytes, param: str, limits: PictureLimits, form_of: FormOf, end_s: float | None = None
) -> InputVideo:
    """Return the clip in the form that ``form_of`` chooses by its head.

    Frames are upright, blended onto white, and scaled to the size: cropped around the centre, or on black. At each
    instant of the constant rate, the nearest frame before it or half an interval after it is shown. RequestError for
    another kind of file, a broken one, above a limit, and if it is not decoded at ``end_s``, by the monotonic clock;
    None: after ``limits.max_video_decode_s``. It takes time: not for an event loop.
    """
    import av

    end_s = limits.decode_end_s() if end_s is None else end_s
    name = _container(data, param)
    if name == "mov":
        data = _with_small_index(data, param)
    if name == "matroska":
        _check_elements(data, param)
    if name == "gif" and GIF_END not in data[-GIF_TAIL:]:
        raise broken(param, "its end is missing")
    with _naming(param), av.open(io.BytesIO(data), "r", format=name, options=OPTIONS) as container:
        file = _File(container=container, param=param, limits=limits, end_s=end_s)
        first, frames = file.open()
        form = form_of(_head(first))
        video = _in_form(_at_rate(chain([first], frames), form.fps), form, param)
    if not form.sound_rate:
        return video
    sound_form = SoundForm(rate=form.sound_rate, start_s=file.start_s, duration_s=video.num_frames / form.fps)
    with _naming(param):
        return replace(video, sound=read_sound(data, name, param, limits, sound_form, end_s))


def _container(data: bytes, param: str) -> str:
    """Return FFmpeg's name of the file's container."""
    if data[4:8] in MOV_ATOMS:
        return "mov"
    if data.startswith(EBML):
        return "matroska"
    if data.startswith(GIF):
        return "gif"
    raise RequestError(f"{param} is no clip that can be read; send {KINDS}", param, code="bad_video")


def _check_elements(data: bytes, param: str) -> None:
    """Raise RequestError for a WebM file with so many texts, chapters or attachments that it takes long to open it."""
    limit = MAX_ELEMENTS + len(data) // BYTES_AN_ELEMENT
    if any(data.count(one) > limit for one in UNUSED_ELEMENTS):
        message = f"{param} has too many texts, chapters or attachments: export it anew without them"
        raise RequestError(message, param, code="video_too_large")


def _with_small_index(data: bytes, param: str) -> bytes:
    """Return an MP4 or MOV file without the boxes that no clip needs. RequestError if its index is too large."""
    parts = list(_parts(data))
    data = b"".join(data[one] if is_media else UNUSED_BOXES.sub(b"free", data[one]) for one, is_media in parts)
    num_samples, num_edits = _index_size(data, [one for one, is_media in parts if not is_media])
    if num_samples * num_edits > MAX_SAMPLES:
        message = f"{param} declares {num_samples} samples and {num_edits} edits: make it shorter, and export it anew"
        raise RequestError(message, param, code="video_too_large")
    return data


def _index_size(data: bytes, parts: Iterable[slice]) -> tuple[int, int]:
    """Return how many samples all tracks declare in ``parts`` of a file, and how many edits one of them has."""
    num_samples, num_edits = 0, 1
    for part in parts:
        for box in re.finditer(b"|".join(COUNTS), data[part]):
            at = part.start + box.end() + COUNTS[box[0]]
            number = int.from_bytes(data[at : at + 4], "big")  # a box of twenty bytes may say any number
            if box[0] == b"elst":
                num_edits = max(num_edits, number)
            else:
                num_samples += number
    return num_samples, num_edits


def _parts(data: bytes) -> Iterator[tuple[slice, bool]]:
    """Yield the parts of an MP4 or MOV file. The flag is True for media, in which FFmpeg reads no boxes."""
    at = 0
    while at < len(data):
        size, kind, head = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8], 8
        if size == 1:
            size, head = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        if size < head:  # 0 stands for the rest, and other numbers are broken
            size = len(data) - at
        end = min(len(data), at + size)
        yield slice(at, end), kind == b"mdat"
        at = end


@dataclass(frozen=True, slots=True)
class _TimedFrame:
    """A decoded frame and when it is shown."""

    frame: av.VideoFrame
    """The frame that PyAV decoded."""
    start_s: float
    """Begin of the frame in the clip."""
    end_s: float
    """End by the frame's own duration; the next frame may come sooner or later."""
    aspect: float
    """Width of a pixel by its height."""


@dataclass(kw_only=True, slots=True)
class _File:
    """An open file. Its decoding stops at the limits."""

    container: InputContainer
    """Container that PyAV has opened."""
    param: str
    """Field of the clip in the body, for messages."""
    limits: PictureLimits
    """Limits of bytes, frames and time."""
    end_s: float
    """Deadline of decoding, by the monotonic clock."""
    start_s: float = field(default=0.0, init=False)
    """Time of the first frame, by the file's clock."""

    def open(self) -> tuple[_TimedFrame, Iterator[_TimedFrame]]:
        """Return the first frame and the others."""
        frames = self._frames()
        first = next(frames, None)
        if first is None:
            raise RequestError(f"{self.param} has no frames; send {KINDS}", self.param, code="bad_video")
        return first, frames

    def _frames(self) -> Iterator[_TimedFrame]:
        stream: Any = self.container.streams.best("video")
        if stream is None:
            return
        if stream.codec_context is None:
            message = f"{self.param} is in an unknown format; send {KINDS} in H.264"
            raise RequestError(message, self.param, code="bad_video")
        self._check_size(stream.codec_context.width, stream.codec_context.height)
        aspect, rate = float(stream.sample_aspect_ratio or 1), float(stream.average_rate or 0)
        start_s: float | None = None
        end_s = last_s = 0.0
        for number, frame in enumerate(self._decoded(stream)):
            self._check(number, frame)
            unit_s = float(frame.time_base or 0)
            interval_s = (frame.duration or 0) * unit_s or (1 / rate if rate else 0.0)
            at_s = end_s if frame.pts is None else frame.pts * unit_s
            if start_s is None:
                self.start_s = start_s = at_s
            last_s = max(last_s, at_s - start_s)
            end_s = last_s + interval_s
            yield _TimedFrame(frame, last_s, end_s, aspect)
        self._check_end(end_s, stream)

    def _decoded(self, stream: Any) -> Iterator[av.VideoFrame]:
        import av

        context = stream.codec_context
        if context.name not in DECODERS:
            message = f"{self.param} is in the format {context.name}, which is not read here; send {KINDS} in H.264"
            raise RequestError(message, self.param, code="bad_video")
        if stream.metadata.get("alpha_mode") == "1" and context.name in WITH_OPACITY:
            context = av.CodecContext.create(WITH_OPACITY[context.name], "r")
        context.thread_count, context.options = 1, {"max_pixels": str(self.limits.max_video_pixels)}
        for packet in self.container.demux(stream):
            if time.monotonic() > self.end_s:
                took = f"is not decoded after {self.limits.max_video_decode_s:g} s"
                raise self._too_large(took, "make it smaller or shorter")
            if packet.is_corrupt:
                raise self._broken("a part of it is missing")
            yield from context.decode(packet)

    def _check(self, number: int, frame: av.VideoFrame) -> None:
        self._check_size(frame.width, frame.height)
        if number >= (most := self.limits.max_video_frames):
            raise self._too_large(f"has more than {most} frames", "make it shorter")

    def _check_size(self, width: int, height: int) -> None:
        if width * height > (most := self.limits.max_video_pixels):
            raise self._too_large(f"has {width}x{height} pixels; a frame may have {most}", "make it smaller")

    def _check_end(self, end_s: float, stream: Any) -> None:
        """Raise RequestError if the frames end early; a longer sound counts only where the file says nothing else."""
        is_known = bool(stream.duration and stream.time_base)
        duration_s = float(stream.duration * stream.time_base) if is_known else (self.container.duration or 0) / 1e6
        if end_s < MIN_SHARE * duration_s - SLACK_S:
            raise self._broken(f"its frames end after {end_s:.3g} s of {duration_s:.3g} s")

    def _too_large(self, fault: str, remedy: str) -> RequestError:
        return RequestError(f"{self.param} {fault}: {remedy}", self.param, code="video_too_large")

    def _broken(self, why: str) -> RequestError:
        return broken(self.param, why)


def broken(param: str, why: object) -> RequestError:
    message = f"{param} is broken, or a part of it is missing ({why}); send {KINDS} that is whole"
    return RequestError(message, param, code="bad_video")


def _at_rate(frames: Iterable[_TimedFrame], fps: int) -> Iterator[tuple[_TimedFrame, int]]:
    """Yield each frame that is shown at a rate of ``fps``, and how many frames of that rate it is."""

    def place(at_s: float) -> int:
        return int(at_s * fps + 0.5)

    def with_end() -> Iterator[_TimedFrame | None]:
        yield from frames
        yield None

    for frame, following in pairwise(with_end()):
        assert frame is not None
        first = place(frame.start_s)
        after = max(1, place(frame.end_s)) if following is None else place(following.start_s)
        if after > first:
            yield frame, after - first


def _in_form(shown: Iterable[tuple[_TimedFrame, int]], form: VideoForm, param: str) -> InputVideo:
    data, num_frames = bytearray(), 0
    for frame, number in shown:
        number = min(number, form.max_frames + (not form.is_cut) - num_frames)
        num_frames += number
        if num_frames > form.max_frames:
            length = f"{form.max_frames} frames at {form.fps} fps"
            message = f"{param} has more than {length}, the most that this model takes; cut it"
            raise RequestError(message, param)
        data += _fitted(frame, form) * number
        if form.is_cut and num_frames == form.max_frames:
            break
    is_short = num_frames < form.min_frames
    kept = num_frames if is_short else num_frames - (num_frames - 1) % form.frame_multiple
    del data[3 * form.width * form.height * kept :]
    return InputVideo(width=form.width, height=form.height, num_frames=kept, fps=form.fps, data=bytes(data))


def _head(first: _TimedFrame) -> VideoHead:
    width, height = _square_size(first)
    is_lying = round(first.frame.rotation / 90) % 2 == 1
    return VideoHead(width=height, height=width) if is_lying else VideoHead(width=width, height=height)


def _square_size(frame: _TimedFrame) -> tuple[int, int]:
    return max(1, round(frame.frame.width * frame.aspect)), frame.frame.height


def _fitted(timed: _TimedFrame, form: VideoForm) -> bytes:
    """Return the pixels of a frame in the size of ``form``; a cropped one as ``InputPicture.cut_to`` does."""
    from PIL import Image, ImageOps

    image = _image(timed.frame)
    if image.size != (size := _square_size(timed)):
        image = image.resize(size)
    if turn := 90 * round(timed.frame.rotation / 90):
        image = image.rotate(turn, expand=True)
    colours = image if image.mode == "RGB" else InputPicture.of(image).on_white()
    fit = ImageOps.pad if form.is_whole else ImageOps.fit
    return fit(colours, (form.width, form.height), Image.Resampling.LANCZOS).tobytes()


def _image(frame: av.VideoFrame) -> Image:
    from PIL import Image

    has_opacity = any(component.is_alpha for component in frame.format.components) or frame.format.has_palette
    mode = "RGBA" if has_opacity else "RGB"
    return Image.fromarray(frame.to_ndarray(format="rgba" if has_opacity else "rgb24"), mode)


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """Turn the errors of FFmpeg into a sentence about the file."""
    import av

    try:
        yield
    except av.FFmpegError as error:
        raise broken(param, error.strerror) from error
