"""Latents become a clip, encoded in groups with the same bytes as all frames at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.stages import vae_decoder
from deployments.stages.common import Workers
from deployments.stages.vae_decoder import ClipFinisher
from engines.core.parcel import Parcel
from pipelines.blocks.decoder import DecodedMedia
from pipelines.media import clip
from pipelines.media.clip import group_length
from pipelines.media.encode import encode_frames, encode_thumbnail
from pipelines.media.sound import Sound
from pipelines.request import InputSound
from tests.deployments.support.fake_service import CLIPS
from tests.support.patience import PATIENCE_S

REQUEST = CLIPS.request(model="m", prompt="a")
FRAMES = np.random.default_rng(0).integers(0, 256, (REQUEST.num_frames, 32, 48, 3), dtype=np.uint8)
SOUND = Sound(samples_CT=np.zeros((1, 8000), np.float32), rate=8000)
LATENTS = Parcel.of({})


class Decoder:
    """Decodes ``FRAMES`` one by one, and waits before those in ``waits`` until a frame is encoded."""

    def __init__(self, waits: tuple[int, ...] = ()) -> None:
        self.waits, self.encoded, self.waited = waits, threading.Event(), list[bool]()

    def decode_chunks(self, latents: Mapping[str, Any], request: Any) -> Iterator[DecodedMedia]:
        last = len(FRAMES) - 1
        for index, frame_HWC in enumerate(FRAMES):
            if index in self.waits:
                self.waited.append(self.encoded.wait(PATIENCE_S))
            yield DecodedMedia(frames_FHWC=frame_HWC[None], sound=SOUND if index == last else None)


def finished(decoder: Any) -> tuple[bytes, bytes]:
    return ClipFinisher(decoder, Workers(1, "decoding"), Workers(1, "writing")).finish(LATENTS, REQUEST)


def test_a_group_is_encoded_while_later_frames_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(waits=(group_length(len(FRAMES)),))
    encode_group = clip.encode_group

    def encode(*group: Any) -> Any:
        packets = encode_group(*group)
        decoder.encoded.set()
        return packets

    monkeypatch.setattr(clip, "encode_group", encode)
    data, thumbnail = finished(decoder)
    assert decoder.waited == [True]
    assert data == encode_frames(FRAMES, "mp4", fps=REQUEST.fps, sound=SOUND)
    assert thumbnail == encode_thumbnail(FRAMES[0])


class SilentDecoder(Decoder):
    def decode_chunks(self, latents: Mapping[str, Any], request: Any) -> Iterator[DecodedMedia]:
        for media in super().decode_chunks(latents, request):
            yield replace(media, sound=None)


@pytest.mark.parametrize(("decoder", "is_copied"), [(SilentDecoder, True), (Decoder, False)])
def test_a_clip_without_a_sound_of_its_own_has_the_one_that_came_along(decoder: Any, *, is_copied: bool) -> None:
    """It is cut to the clip's length."""
    whole_s = REQUEST.num_frames / REQUEST.fps
    samples_CT = np.random.default_rng(1).random((2, round(3 * whole_s * 48_000)), np.float32) - 0.5
    sound = InputSound(num_channels=2, rate=48_000, data=samples_CT.tobytes())
    stage = ClipFinisher(decoder(), Workers(1, "decoding"), Workers(1, "writing"))
    data, _ = stage.finish(LATENTS, REQUEST, copied=vae_decoder._copied(sound, REQUEST))
    expected = Sound(samples_CT=samples_CT[:, : round(whole_s * 48_000)], rate=48_000) if is_copied else SOUND
    assert data == encode_frames(FRAMES, "mp4", fps=REQUEST.fps, sound=expected)


def test_the_thumbnail_is_made_while_later_frames_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(waits=(len(FRAMES) - 1,))

    def encode(frame_HWC: Any) -> bytes:
        decoder.encoded.set()
        return encode_thumbnail(frame_HWC)

    monkeypatch.setattr(vae_decoder, "encode_thumbnail", encode)
    _, thumbnail = finished(decoder)
    assert decoder.waited == [True]
    assert thumbnail == encode_thumbnail(FRAMES[0])


def test_clips_wait_for_their_groups_without_taking_their_threads() -> None:
    """Eight clips run in one process: each caller gets its own."""
    stage = ClipFinisher(Decoder(), Workers(1, "decoding"), Workers(2, "writing"))  # type: ignore[arg-type]
    with ThreadPoolExecutor(8) as callers:
        clips = list(callers.map(lambda _: stage.finish(LATENTS, REQUEST), range(8)))
    assert len(set(clips)) == 1


def test_a_decoding_that_fails_ends_the_clip() -> None:
    class Failing(Decoder):
        def decode_chunks(self, latents: Mapping[str, Any], request: Any) -> Iterator[DecodedMedia]:
            yield DecodedMedia(frames_FHWC=FRAMES[:1])
            raise MemoryError("no room for the second frame")

    with pytest.raises(MemoryError, match="second frame"):
        finished(Failing())
