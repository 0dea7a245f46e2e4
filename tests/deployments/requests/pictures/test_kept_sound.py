"""The sound of strangers' clips is read as by diffusers, with rates, faults and limits."""

from __future__ import annotations

import io
import tracemalloc
from fractions import Fraction
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3AudioReference
from numpy.typing import NDArray

from deployments.requests.pictures import limits, sound, sources, video
from deployments.requests.pictures.limits import PictureLimits
from deployments.requests.pictures.sound import MAX_BLOCK_SAMPLES
from deployments.requests.pictures.sources import Sources
from deployments.requests.pictures.unpack import unpack
from deployments.requests.request_errors import RequestError
from pipelines.request import InputPictures, InputSound
from tests.deployments.requests.pictures.test_video import FPS, GREYS, MP4, NUM_FRAMES, form, read, refusal

RATE = 16_000
DURATION_S = NUM_FRAMES / FPS
HZ = (440, 660)
NOISE = 0.02
"""Difference that a lossy encoder makes to a tone of half the range, on average."""


def tone(num_channels: int, rate: int, duration_s: float) -> NDArray[np.float32]:
    times_s = np.arange(round(duration_s * rate)) / rate
    return np.stack([np.sin(2 * np.pi * hz * times_s) / 2 for hz in (HZ * 4)[:num_channels]]).astype(np.float32)


def with_sound(
    sound_CT: NDArray[np.float32],
    *,
    container: str = "mp4",
    codecs: tuple[str, str] = ("libx264", "aac"),
    rate: int = RATE,
    layout: str = "stereo",
    first_s: float = 0.0,
    shown_s: float = 0.0,
) -> bytes:
    """Return a clip of greys, shown from ``shown_s`` on, with ``sound_CT``, which begins at ``first_s``."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codecs[0], rate=FPS)
        stream.height, stream.width, stream.pix_fmt = *GREYS[0].shape[:2], "yuv420p"
        track: Any = output.add_stream(codecs[1], rate=rate, layout=layout)
        for number, frame_HWC in enumerate(GREYS):
            frame = av.VideoFrame.from_ndarray(frame_HWC, format="rgba").reformat(format="yuv420p")
            frame.pts, frame.time_base = number + round(shown_s * FPS), Fraction(1, FPS)
            output.mux(stream.encode(frame))
        planar = track.format.name
        samples = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound_CT), format="fltp", layout=layout)
        samples.sample_rate, samples.time_base, samples.pts = rate, Fraction(1, rate), round(first_s * rate)
        resampler = av.AudioResampler(format=planar, layout=layout, rate=rate, frame_size=track.frame_size or 1024)
        for one in (*resampler.resample(samples), *resampler.resample(None)):
            output.mux(track.encode(one))
        output.mux(track.encode(None))
        output.mux(stream.encode(None))
    return file.getvalue()


def sound_of(data: bytes, limits: PictureLimits | None = None, **form_: Any) -> InputSound | None:
    return read(data, limits, **{"sound_rate": RATE, **form_}).sound


def samples_of(sound: InputSound | None) -> NDArray[np.float32]:
    assert sound is not None
    return np.frombuffer(sound.data, np.float32).reshape(sound.num_channels, -1)


FILES: dict[str, dict[str, Any]] = {
    "mp4, aac": {},
    "mov, pcm": {"container": "mov", "codecs": ("libx264", "pcm_s16le"), "layout": "mono"},
    "mov, alac": {"container": "mov", "codecs": ("libx264", "alac")},
    "webm, opus": {"container": "webm", "codecs": ("libvpx", "libopus"), "rate": 48_000},
    "mkv, flac": {"container": "matroska", "codecs": ("libx264", "flac")},
    "mp4, mp3": {"codecs": ("libx264", "libmp3lame")},
}


@pytest.mark.parametrize("name", FILES)
def test_samples_are_those_that_diffusers_reads(name: str, tmp_path: Path) -> None:
    """The rate is the file's own; a sound longer than the clip is cut."""
    options = FILES[name]
    rate, num_channels = options.get("rate", RATE), 1 if options.get("layout") == "mono" else 2
    data = with_sound(tone(num_channels, rate, 1.0), **options)
    (tmp_path / "clip").write_bytes(data)
    reference = MiniMaxH3AudioReference.from_file(tmp_path / "clip")
    assert reference.sample_rate == rate
    own = samples_of(sound_of(data, sound_rate=rate))
    num_samples = round(DURATION_S * rate)
    assert own.shape == (num_channels, num_samples)
    assert np.array_equal(own, reference.audio.numpy()[:, :num_samples])
    assert np.abs(own - tone(num_channels, rate, DURATION_S)).mean() < NOISE


def test_a_sound_far_longer_than_the_frames_is_no_fault() -> None:
    assert samples_of(sound_of(with_sound(tone(2, RATE, 4.0)))).shape == (2, round(DURATION_S * RATE))


@pytest.mark.parametrize(("rate", "wanted"), [(44_100, 32_000), (16_000, 48_000)])
def test_another_rate_is_resampled(rate: int, wanted: int) -> None:
    sound = sound_of(with_sound(tone(2, rate, 1.0), rate=rate), sound_rate=wanted)
    assert (sound and sound.rate) == wanted
    assert np.abs(samples_of(sound) - tone(2, wanted, DURATION_S)).mean() < NOISE


def test_a_sound_that_begins_later_follows_silence() -> None:
    late_s, codecs = 0.25, ("libx264", "flac")
    data = with_sound(tone(2, RATE, DURATION_S - late_s), container="matroska", codecs=codecs, first_s=late_s)
    own, num_silent = samples_of(sound_of(data)), round(late_s * RATE)
    assert own.shape[1] == round(DURATION_S * RATE)
    assert not own[:, :num_silent].any()
    expected = tone(2, RATE, DURATION_S - late_s)
    assert np.abs(own[:, num_silent:] - expected).max() < 1e-3


def test_more_channels_are_mixed_into_two() -> None:
    """Half of a front channel goes to its side (ITU-R BS.775); only front channels play here."""
    sound_CT = tone(6, RATE, 1.0)
    sound_CT[2:] = 0
    data = with_sound(sound_CT, container="matroska", codecs=("libx264", "flac"), layout="5.1")
    own, expected = samples_of(sound_of(data)), tone(2, RATE, DURATION_S)
    assert own.shape == expected.shape
    for channel, hers in zip(own, expected, strict=True):
        assert np.corrcoef(channel, hers)[0, 1] > 0.99


FRAME_SAMPLES = 576
"""Samples of an MP3 frame up to 24 kHz (ISO/IEC 13818-3)."""


def packets(sound_CT: NDArray[np.float32], rate: int, layout: str) -> list[Any]:
    """Return MP3 packets of a separate encoder."""
    context: Any = av.CodecContext.create("libmp3lame", "w")
    context.sample_rate, context.layout, context.format, context.time_base = rate, layout, "fltp", Fraction(1, rate)
    context.open()
    resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate, frame_size=context.frame_size)
    samples = av.AudioFrame.from_ndarray(sound_CT, format="fltp", layout=layout)
    samples.sample_rate, samples.time_base, samples.pts = rate, Fraction(1, rate), 0
    frames = [*resampler.resample(samples), *resampler.resample(None)]
    return [one for frame in (*frames, None) for one in context.encode(frame)]


def spliced(*parts: tuple[int, str]) -> bytes:
    """Return a clip of greys whose MP3 has 0.35 s of each rate and layout."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream: Any = output.add_stream("libx264", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = *GREYS[0].shape[:2], "yuv420p"
        track: Any = output.add_stream("libmp3lame", rate=parts[0][0], layout=parts[0][1])
        track.codec_context.format = "fltp"
        for number, frame_HWC in enumerate(GREYS):
            frame = av.VideoFrame.from_ndarray(frame_HWC, format="rgba").reformat(format="yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        output.start_encoding()
        at_s = 0.0
        for rate, layout in parts:
            for packet in packets(tone(1 + (layout == "stereo"), rate, 0.35), rate, layout):
                packet.stream, packet.time_base = track, Fraction(1, rate)
                packet.pts = packet.dts = round(at_s * rate)
                at_s += FRAME_SAMPLES / rate
                output.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize("second", [(RATE, "mono"), (24_000, "stereo"), (24_000, "mono")])
def test_a_sound_that_changes_its_form_keeps_its_two_channels_and_speed(second: tuple[int, str]) -> None:
    own = samples_of(sound_of(spliced((RATE, "stereo"), second)))
    assert own.shape == (2, round(DURATION_S * RATE))
    assert main_hz(own[0, : RATE // 5]) == pytest.approx(HZ[0], abs=10)
    assert main_hz(own[1, : RATE // 5]) == pytest.approx(HZ[1], abs=10)
    after = own[:, -RATE // 5 :]
    assert main_hz(after[0]) == pytest.approx(HZ[0], abs=10)
    assert main_hz(after[1]) == pytest.approx(HZ[second[1] == "stereo"], abs=10)


def main_hz(samples: NDArray[np.float32]) -> float:
    """Return the loudest frequency."""
    return float(np.abs(np.fft.rfft(samples)).argmax() * RATE / len(samples))


def test_a_clip_without_a_sound_has_none_and_one_that_is_dropped_is_not_read() -> None:
    assert sound_of(MP4) is None
    assert sound_of(with_sound(tone(2, RATE, 1.0)), sound_rate=0) is None


def test_only_the_frames_that_are_kept_are_heard() -> None:
    data = with_sound(tone(2, RATE, 1.0))
    assert samples_of(sound_of(data, max_frames=3, is_cut=True)).shape == (2, round(3 / FPS * RATE))


def test_what_is_after_the_last_frame_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, check = list[int](), sound._check_frame

    def counted(frame: av.AudioFrame, param: str) -> None:
        numbers.append(frame.samples)
        check(frame, param)

    monkeypatch.setattr(sound, "_check_frame", counted)
    data = with_sound(tone(2, RATE, 20.0))
    kept = samples_of(sound_of(data, max_frames=3, is_cut=True)).shape[1]
    assert kept <= sum(numbers) < kept + 4 * max(numbers), "the sound has twenty seconds"


def test_all_clips_of_a_request_and_their_sounds_have_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a second. One clip is in time, and three are not."""
    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    for module in (limits, sound, video):
        monkeypatch.setattr(module, "time", clock, raising=False)
    data = with_sound(tone(2, RATE, 1.0))

    def unpacked(number: int, limit_s: float) -> InputPictures:
        others = (data,) * (number - 1)
        given = Sources(param="input_reference", video=data, further_videos=others)
        allowed = PictureLimits(max_video_decode_s=limit_s)
        return unpack(given, allowed, lambda *_: form(sound_rate=RATE))

    began = next(ticks)
    assert unpacked(1, 1e9).videos[0].sound is not None
    own_s = next(ticks) - began
    assert len(unpacked(3, 3.5 * own_s).videos) == 3
    assert len(unpacked(1, 1.5 * own_s).videos) == 1
    with pytest.raises(RequestError, match="is not decoded after") as raised:
        unpacked(3, 1.5 * own_s)
    assert raised.value.code == "video_too_large"


def test_the_time_of_decoding_begins_when_all_clips_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetching has its own limit: here three clips and a mask take 80 s, in which nothing is decoded."""
    fetched_urls = list[str]()

    def fetched(url: str, *_: object) -> bytes:
        fetched_urls.append(url)
        return MP4

    clock = SimpleNamespace(monotonic=lambda: 20.0 * len(fetched_urls))
    for module in (limits, sound, video):
        monkeypatch.setattr(module, "time", clock, raising=False)
    monkeypatch.setattr(sources, "fetched", fetched)
    origin, urls = "https://clips.example.com", [f"https://clips.example.com/{number}" for number in range(4)]
    first, second, third, mask = urls
    given = Sources(param="input_reference", video=first, further_videos=(second, third), video_mask=mask)
    allowed = PictureLimits(picture_origins=(origin,), max_video_decode_s=1.0)
    assert len(unpack(given, allowed, lambda *_: form()).videos) == 3
    assert fetched_urls == urls


def test_what_is_before_the_first_frame_takes_no_memory() -> None:
    shown_s = 120.0
    sound_CT = np.zeros((1, round((shown_s + 1) * RATE)), np.float32)
    sound_CT[:, round(shown_s * RATE) :] = tone(1, RATE, 1.0)
    codecs = ("libx264", "flac")
    data = with_sound(sound_CT, container="matroska", codecs=codecs, layout="mono", shown_s=shown_s)
    tracemalloc.start()
    try:
        own = samples_of(sound_of(data, max_frames=3, is_cut=True))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.abs(own - tone(1, RATE, 3 / FPS)).max() < 1e-3
    assert peak_bytes < sound_CT.nbytes / 4


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_samples_that_are_no_sound_are_refused(value: float) -> None:
    sound_CT = tone(1, RATE, 1.0)
    sound_CT[0, 100] = value
    error = refusal(float_sound(sound_CT), sound_rate=RATE)
    assert (error.code, "samples that are no numbers" in error.message) == ("bad_video", True), error


def test_a_sound_louder_than_full_scale_is_kept() -> None:
    loud_CT = 3 * tone(1, RATE, DURATION_S)
    assert np.array_equal(samples_of(sound_of(float_sound(loud_CT))), loud_CT)


def float_sound(sound_CT: NDArray[np.float32]) -> bytes:
    return with_sound(sound_CT, container="matroska", codecs=("libx264", "pcm_f32le"), layout="mono")


def long_block() -> bytes:
    """Return a clip whose samples are all in one block of Matroska, and become six times as many."""
    file, num_samples = io.BytesIO(), MAX_BLOCK_SAMPLES + 1
    with av.open(file, "w", format="matroska") as output:
        stream: Any = output.add_stream("libx264", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = *GREYS[0].shape[:2], "yuv420p"
        track: Any = output.add_stream("pcm_u8", rate=8_000, layout="mono")
        for number, frame_HWC in enumerate(GREYS):
            frame = av.VideoFrame.from_ndarray(frame_HWC, format="rgba").reformat(format="yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            output.mux(stream.encode(frame))
        samples = av.AudioFrame.from_ndarray(np.full((1, num_samples), 128, np.uint8), format="u8", layout="mono")
        samples.sample_rate, samples.time_base, samples.pts = 8_000, Fraction(1, 8_000), 0
        output.mux([*track.encode(samples), *track.encode(None), *stream.encode(None)])
    return file.getvalue()


def test_a_block_of_far_more_samples_than_the_clip_is_refused() -> None:
    error = refusal(long_block(), sound_rate=48_000, max_frames=3, is_cut=True)
    assert (error.code, f"{MAX_BLOCK_SAMPLES + 1} samples" in error.message) == ("bad_video", True), error


def damaged() -> bytes:
    """Return a clip whose tables place the sound's samples elsewhere."""
    data = with_sound(tone(2, RATE, 1.0))
    at = data.rindex(b"stco") + 8
    number = int.from_bytes(data[at : at + 4], "big")
    wrong = b"".join((len(data) - 40).to_bytes(4, "big") for _ in range(number))
    return data[: at + 4] + wrong + data[at + 4 + 4 * number :]


@pytest.mark.parametrize(
    ("data", "limits", "told", "code"),
    [
        (with_sound(tone(2, RATE, 1.0)), {"max_sound_s": 0.5}, "0.75 s long; with keep_audio it may have 0.5 s", 413),
        (with_sound(tone(2, 4000, 1.0), container="mov", codecs=("libx264", "pcm_s16le"), rate=4000), {}, "4000", 400),
        (
            with_sound(tone(2, RATE, 1.0), container="mov", codecs=("libx264", "adpcm_ima_qt")),
            {},
            "the format adpcm_ima_qt, which is not read here",
            400,
        ),
        (damaged(), {}, "broken", 400),
    ],
    ids=["seconds", "rate", "format", "broken"],
)
def test_sounds_that_are_refused(data: bytes, limits: dict[str, Any], told: str, code: int) -> None:
    error = refusal(data, PictureLimits(**limits), sound_rate=RATE)
    assert (error.code, told in error.message) == ("video_too_large" if code == 413 else "bad_video", True), error
    assert read(data, **form_without_sound()).num_frames == NUM_FRAMES


def form_without_sound() -> dict[str, Any]:
    assert form().sound_rate == 0
    return {"sound_rate": 0}
