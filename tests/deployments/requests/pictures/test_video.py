"""Strangers' clips, written by PyAV: containers, rates, rotation, opacity, broken files and limits."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from deployments.requests.pictures.limits import PictureLimits
from deployments.requests.pictures.sources import Sources
from deployments.requests.pictures.unpack import unpack
from deployments.requests.pictures.video import VideoForm, VideoHead
from deployments.requests.request_errors import RequestError
from pipelines.media.clip import encode_clip
from pipelines.request import InputPictures, InputVideo

WIDTH, HEIGHT, FPS, NUM_FRAMES = 64, 48, 8, 6
LEVELS = tuple(range(20, 260, 40))
"""One grey for each frame."""
TOLERANCE = 6
"""Levels by which an encoder may miss."""
MS = Fraction(1, 1000)


def grey(level: int) -> NDArray[np.uint8]:
    return np.full((HEIGHT, WIDTH, 4), (level, level, level, 255), np.uint8)


def marked() -> NDArray[np.uint8]:
    """Return black with a white left half."""
    frame = grey(0)
    frame[:, : WIDTH // 2, :3] = 255
    return frame


def written(
    container: str,
    codec: str,
    pix_fmt: str,
    frames_HWC: Sequence[NDArray[np.uint8]],
    *,
    times_ms: Sequence[int] | None = None,
    rotation: int = 0,
    with_sound: bool = False,
    aspect: Fraction | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> bytes:
    """Return a file of these frames (RGBA), at the constant rate or at ``times_ms``."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=container_options or {}) as output:
        stream: Any = output.add_stream(codec, rate=FPS, options=options or {})
        stream.height, stream.width, stream.pix_fmt = *frames_HWC[0].shape[:2], pix_fmt
        if aspect is not None:
            stream.sample_aspect_ratio = aspect
        if times_ms is not None:
            stream.codec_context.time_base = MS
        if rotation:
            stream.set_display_rotation(rotation)
        if with_sound:
            output.add_stream("aac", rate=8000, layout="mono")
            sound = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
            sound.sample_rate, sound.time_base, sound.pts = 8000, Fraction(1, 8000), 0
            output.mux(output.streams.audio[0].encode(sound))
        for number, frame_HWC in enumerate(frames_HWC):
            frame = av.VideoFrame.from_ndarray(frame_HWC, format="rgba").reformat(format=pix_fmt)
            frame.pts, frame.time_base = (number, Fraction(1, FPS)) if times_ms is None else (times_ms[number], MS)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def gif(frames_HWC: Sequence[NDArray[np.uint8]], duration_ms: int = 125) -> bytes:
    """Return a GIF by Pillow, which keeps transparency."""
    file = io.BytesIO()
    first, *others = (Image.fromarray(frame_HWC, "RGBA") for frame_HWC in frames_HWC)
    first.save(file, "GIF", save_all=True, append_images=others, duration=duration_ms, disposal=2)
    return file.getvalue()


GREYS = [grey(level) for level in LEVELS]
H264 = ("mp4", "libx264", "yuv420p")
MP4 = written(*H264, GREYS)
FILES = {
    "mp4": MP4,
    "mp4 with sound": written(*H264, GREYS, with_sound=True),
    "mov, hevc": written("mov", "libx265", "yuv420p", GREYS, options={"x265-params": "log-level=none"}),
    "webm, vp8": written("webm", "libvpx", "yuv420p", GREYS),
    "webm, vp9": written("webm", "libvpx-vp9", "yuv420p", GREYS),
    "gif": gif(GREYS),
    "ours": encode_clip(np.stack(GREYS)[..., :3].copy(), FPS),
}


def form(**changes: Any) -> VideoForm:
    values = {"width": WIDTH, "height": HEIGHT, "fps": FPS, "max_frames": 100}
    return VideoForm(**{**values, **changes})


def read(
    data: bytes, limits: PictureLimits | None = None, heads: list[VideoHead] | None = None, **form_: Any
) -> InputVideo:
    """Return the clip; its head is added to ``heads``."""

    def form_of(head: VideoHead, _pictures: InputPictures) -> VideoForm:
        if heads is not None:
            heads.append(head)
        return form(**form_)

    video = unpack(Sources(param="input_reference", video=data), limits or PictureLimits(), form_of).video
    assert video is not None
    assert len(video.data) == 3 * video.width * video.height * video.num_frames
    return video


def levels(video: InputVideo) -> list[float]:
    """Return the mean of each frame."""
    return [float(np.asarray(frame).mean()) for frame in video.frames()]


def refusal(data: bytes, limits: PictureLimits | None = None, **form_: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(data, limits, **form_)
    assert caught.value.param == "video"
    return caught.value


@pytest.mark.parametrize("name", FILES)
def test_frames_are_those_of_the_file(name: str) -> None:
    heads: list[VideoHead] = []
    video = read(FILES[name], heads=heads)
    assert heads == [VideoHead(width=WIDTH, height=HEIGHT)]
    assert (video.width, video.height, video.num_frames, video.fps) == (WIDTH, HEIGHT, NUM_FRAMES, FPS)
    assert levels(video) == pytest.approx(LEVELS, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("fps", "expected"),
    [(4, LEVELS[::2]), (16, [level for level in LEVELS for _ in range(2)]), (FPS, LEVELS)],
)
def test_a_clip_comes_at_the_rate_of_the_request(fps: int, expected: Sequence[int]) -> None:
    """At half the rate, the frame that starts within half an interval is shown early: 0, 2, 4 of 0 to 5."""
    assert levels(read(MP4, fps=fps)) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("kind", [H264, ("webm", "libvpx", "yuv420p")])
def test_a_variable_rate_becomes_constant(kind: tuple[str, str, str]) -> None:
    """A frame stays until the next one; WebM rounds times to milliseconds."""
    file = written(*kind, GREYS[:4], times_ms=[0, 125, 625, 750])
    first, second, third, fourth = LEVELS[:4]
    shown = levels(read(file))
    assert shown[:7] == pytest.approx([first, second, second, second, second, third, fourth], abs=TOLERANCE)
    assert set(np.round(shown[7:])) <= {round(shown[6])}, "the last frame lasts as its file says"


def test_times_that_are_rounded_lose_no_frame() -> None:
    """At 7 a second, no frame begins at a whole millisecond."""
    file = written("webm", "libvpx", "yuv420p", GREYS, times_ms=[round(1000 * number / 7) for number in range(6)])
    assert levels(read(file, fps=7))[:6] == pytest.approx(LEVELS, abs=TOLERANCE)


@pytest.mark.parametrize(("rotation", "white"), [(90, "bottom"), (-90, "top"), (180, "right")])
def test_a_rotated_clip_is_upright(rotation: int, white: str) -> None:
    """The left half is white; turned counterclockwise by 90 degrees it is at the bottom."""
    heads: list[VideoHead] = []
    lies = rotation != 180
    size: dict[str, Any] = {"width": HEIGHT, "height": WIDTH} if lies else {"width": WIDTH, "height": HEIGHT}
    video = read(written(*H264, [marked()] * 2, rotation=rotation), heads=heads, **size)
    assert heads == [VideoHead(**size)]
    pixels_HWC = np.asarray(video.frames()[0]).astype(float)
    halves = {
        "top": pixels_HWC[: size["height"] // 2],
        "bottom": pixels_HWC[size["height"] // 2 :],
        "right": pixels_HWC[:, size["width"] // 2 :],
        "left": pixels_HWC[:, : size["width"] // 2],
    }
    assert max(halves, key=lambda name: float(halves[name].mean())) == white


def test_pixels_become_square() -> None:
    heads: list[VideoHead] = []
    read(written(*H264, [marked()] * 2, aspect=Fraction(2, 1)), heads=heads, width=128, height=48)
    assert heads == [VideoHead(width=2 * WIDTH, height=HEIGHT)]


def half_seen(level: int) -> NDArray[np.uint8]:
    """Return grey with a transparent right half."""
    frame = grey(level)
    frame[:, WIDTH // 2 :, 3] = 0
    return frame


@pytest.mark.parametrize("kind", ["gif", "vp8", "vp9"])
def test_what_is_transparent_is_white(kind: str) -> None:
    frames = [half_seen(level) for level in LEVELS[:3]]
    codec = {"vp8": "libvpx", "vp9": "libvpx-vp9"}.get(kind, "")
    data = gif(frames) if kind == "gif" else written("webm", codec, "yuva420p", frames, options={"auto-alt-ref": "0"})
    for level, image in zip(LEVELS, read(data).frames(), strict=False):
        pixels_HWC = np.asarray(image)
        assert pixels_HWC[4, 4] == pytest.approx([level] * 3, abs=TOLERANCE)
        assert pixels_HWC[4, -4] == pytest.approx([255] * 3, abs=TOLERANCE)


def test_frames_cover_the_size_of_the_request() -> None:
    """Black and white halves stay halves, cropped around the centre."""
    video = read(written(*H264, [marked()] * 2), width=32, height=96)
    pixels_HWC = np.asarray(video.frames()[0]).astype(float)
    assert pixels_HWC.shape == (96, 32, 3)
    assert pixels_HWC[:, :12].mean() > 250
    assert pixels_HWC[:, 20:].mean() < 5


def test_a_clip_is_cut_where_the_request_says_and_refused_where_it_does_not() -> None:
    assert levels(read(MP4, max_frames=4, is_cut=True)) == pytest.approx(LEVELS[:4], abs=TOLERANCE)
    assert read(MP4, max_frames=NUM_FRAMES).num_frames == NUM_FRAMES
    assert "more than 5 frames at 8 fps, the most that this model takes" in refusal(MP4, max_frames=5).message
    assert levels(read(MP4, frame_multiple=4)) == pytest.approx(LEVELS[:5], abs=TOLERANCE)


def test_a_frame_of_a_year_makes_no_more_frames_than_are_needed() -> None:
    file = written("matroska", "libvpx", "yuv420p", GREYS[:3], times_ms=[0, 2_000_000_000, 2_000_000_125])
    assert levels(read(file, max_frames=9, is_cut=True)) == pytest.approx([LEVELS[0]] * 9, abs=TOLERANCE)
    assert refusal(file).code == "invalid_value"


BROKEN = {
    "mp4 without its end": MP4[: len(MP4) // 2],
    "webm without its end": FILES["webm, vp9"][: len(FILES["webm, vp9"]) // 2],
    "matroska of noise": b"\x1aE\xdf\xa3" + bytes(range(256)) * 8,
    "gif without its end": FILES["gif"][: len(FILES["gif"]) * 2 // 3],
    "gif of noise": b"GIF89a" + bytes(range(256)) * 8,
    "mp4 of noise": b"\0\0\0\x18ftyp" + bytes(range(256)) * 8,
    "a playlist": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(64),
    "nothing": b"",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_clip_is_a_clear_error(name: str) -> None:
    error = refusal(BROKEN[name])
    assert error.code == "bad_video"
    assert "send an MP4, MOV, WebM or GIF file" in error.message


def test_a_codec_that_is_not_read_is_named() -> None:
    assert "is in the format ffv1" in refusal(written("matroska", "ffv1", "yuv420p", GREYS[:2])).message


def test_a_codec_that_nobody_knows_is_refused() -> None:
    at = MP4.rindex(b"avc1")
    error = refusal(MP4[:at] + b"XXXX" + MP4[at + 4 :])
    assert (error.code, "video is in an unknown format" in str(error)) == ("bad_video", True)


def test_sound_alone_is_no_clip() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    assert "has no frames" in refusal(file.getvalue()).message


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"max_video_bytes": 100}, "a clip may have 100 at most"),
        ({"max_video_pixels": 1000}, "video has 64x48 pixels; a frame may have 1000: make it smaller"),
        ({"max_video_frames": 5}, "video has more than 5 frames: make it shorter"),
        ({"max_video_decode_s": 1e-9}, "video is not decoded after 1e-09 s: make it smaller or shorter"),
    ],
)
def test_limits_are_kept(limits: dict[str, Any], told: str) -> None:
    error = refusal(MP4, PictureLimits(**limits))
    assert error.code == "video_too_large"
    assert told in error.message


def test_frames_that_grow_are_no_way_round_the_limit() -> None:
    """The head and the first frame are 64x48; the second is a key frame of 256x192."""
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as output:
        stream: Any = output.add_stream("libvpx", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        output.start_encoding()
        for number, scale in enumerate((1, 4)):
            encoder: Any = av.CodecContext.create("libvpx", "w")
            encoder.width, encoder.height, encoder.pix_fmt = scale * WIDTH, scale * HEIGHT, "yuv420p"
            encoder.time_base, encoder.framerate = Fraction(1, FPS), Fraction(FPS)
            pixels_HWC = np.full((scale * HEIGHT, scale * WIDTH, 3), 90, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels_HWC, format="rgb24").reformat(format="yuv420p")
            frame.pts = number
            for packet in (*encoder.encode(frame), *encoder.encode(None)):
                packet.stream = stream
                output.mux(packet)
    assert read(file.getvalue()).num_frames == 2
    error = refusal(file.getvalue(), PictureLimits(max_video_pixels=2 * WIDTH * HEIGHT))
    assert error.code in ("bad_video", "video_too_large")


def of_boxes(container: str, flags: str) -> bytes:
    """Return a clip whose index follows FFmpeg's ``flags``."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options={"movflags": flags}) as output:
        stream: Any = output.add_stream("libx264", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        for level in LEVELS:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(grey(level), format="rgba")))
        output.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("flags", ["write_colr", "frag_keyframe+empty_moov", "dash"])
def test_indices_of_fragments_are_read(flags: str) -> None:
    data = of_boxes("mp4", flags)
    assert (b"sidx" in data) == (flags == "dash")
    assert levels(read(data)) == pytest.approx(LEVELS, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "flags", "number", "told"),
    [
        (b"stsz", "write_colr", 1 << 28, "268435456 samples and 1 edits"),
        (b"trun", "frag_keyframe+empty_moov", 1 << 28, "268435456 samples"),
        (b"elst", "write_colr", 1 << 24, "6 samples and 16777216 edits"),
    ],
)
def test_a_small_file_with_a_large_index_is_refused(kind: bytes, flags: str, number: int, told: str) -> None:
    """Its index would take gigabytes."""
    data = of_boxes("mov", flags)
    at = data.index(kind) + 8
    head = (1).to_bytes(4, "big") if kind == b"stsz" else b""  # all samples are of one byte
    data = data[:at] + head + number.to_bytes(4, "big") + data[at + len(head) + 4 :]
    error = refusal(data)
    assert (error.code, told in str(error)) == ("video_too_large", True)


def box(kind: bytes, content: bytes) -> bytes:
    return (len(content) + 8).to_bytes(4, "big") + kind + content


def element(kind: bytes, content: bytes) -> bytes:
    return kind + (len(content) | 1 << 56).to_bytes(8, "big") + content


def mp4_with_texts(number: int, kind: str) -> bytes:
    """Return a clip with texts under names of their own, as QuickTime or iTunes has them."""
    value, names = box(b"data", bytes((0, 0, 0, 1, 0, 0, 0, 0)) + b"b"), [b"a%d" % i for i in range(number)]
    if kind == "keys":
        keys = box(b"keys", bytes(4) + number.to_bytes(4, "big") + b"".join(box(b"mdta", name) for name in names))
        listed = box(b"ilst", b"".join(box(i.to_bytes(4, "big"), value) for i in range(1, number + 1)))
        texts = box(b"meta", box(b"hdlr", bytes(8) + b"mdta" + bytes(13)) + keys + listed)
    else:
        mean = box(b"mean", bytes(4) + b"c")
        texts = b"".join(box(b"----", mean + box(b"name", bytes(4) + name) + value) for name in names)
    at = MP4.index(b"moov") - 4
    end = at + int.from_bytes(MP4[at : at + 4], "big")
    return MP4[:at] + box(b"moov", MP4[at + 8 : end] + texts) + MP4[end:]


@pytest.mark.parametrize("kind", ["keys", "custom"])
def test_many_texts_of_an_mp4_take_no_time(kind: str) -> None:
    """FFmpeg compares each with all others, which no deadline ends."""
    data = mp4_with_texts(60_000, kind)
    assert levels(read(data, PictureLimits(max_video_decode_s=2.0))) == pytest.approx(LEVELS, abs=TOLERANCE)


def webm_with_texts(number: int) -> bytes:
    data = written("matroska", "libx264", "yuv420p", GREYS, container_options={"live": "1"})
    at = data.index(b"\x1f\x43\xb6\x75")  # the first cluster
    names = (element(b"\x45\xa3", b"a%d" % i) + element(b"\x44\x87", b"b") for i in range(number))
    texts = element(b"\x63\xc0", b"") + b"".join(element(b"\x67\xc8", name) for name in names)
    return data[:at] + element(b"\x12\x54\xc3\x67", element(b"\x73\x73", texts)) + data[at:]


def test_many_texts_of_a_webm_are_refused() -> None:
    assert levels(read(webm_with_texts(1000))) == pytest.approx(LEVELS, abs=TOLERANCE)
    error = refusal(webm_with_texts(60_000), PictureLimits(max_video_decode_s=2.0))
    assert (error.code, "too many texts" in str(error)) == ("video_too_large", True)
