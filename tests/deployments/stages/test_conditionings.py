"""A cached conditioning gives other requests with the same inputs the same picture, without the encoder."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deployments.stages.common import NO_SENT_PICTURES, Encoded, SentPictures, StageWeights, Workers
from deployments.stages.text_encoder import OVERHEAD_BYTES, CacheKeys, ConditioningCache, PromptEncoder
from pipelines.blocks.encoder import Conditioning
from pipelines.blocks.state import NoiseState
from pipelines.checkpoint import Checkpoint
from pipelines.loading import resolve_path
from pipelines.media.encode import encode_frames
from pipelines.request import InputPicture, InputPictures, InputSound, InputVideo, Lora, MediaRequest, SecondStage
from pipelines.run import load_pipeline
from pipelines.solver import Solver
from tests.deployments.stages.test_stages import spec_of, tensors
from tests.deployments.support.fake_service import EDITS
from tests.deployments.support.files import noise

PROMPT = "a small red circle above a large blue square"
REQUEST = EDITS.request(prompt=PROMPT, request_id="first")
MATTERS_NOT: dict[str, Any] = {
    "request_id": "second",
    "preview_steps": (1, 2),
    "service_tier": "flex",
    "deadline_s": 3.0,
    "waited_s": 2.0,
    "weight": 2.0,
    "seed": 7,
    "enhance_prompt": True,
    "enhancer_outcome": "timeout",
    "given_prompt": "a circle",
    "source_clip_id": "video_1",
    "attention": "fp8",
    "solver": Solver(flow_shift=3.0, sigmas=(1.0, 0.5)),
}
MATTERS: dict[str, Any] = {
    "model": "other",
    "kind": "video",
    "prompt": PROMPT + " ",
    "negative_prompt": "blue",
    "width": REQUEST.width + 16,
    "height": REQUEST.height + 16,
    "num_frames": 5,
    "fps": 3,
    "num_inference_steps": REQUEST.num_inference_steps + 1,
    "guidance_scale": REQUEST.guidance_scale + 1,
    "true_cfg_scale": REQUEST.true_cfg_scale + 1,
    "num_pictures": REQUEST.num_pictures + 1,
    "frame_indices": (0, -1),
    "has_mask": True,
    "num_video_frames": 5,
    "further_video_frames": (5,),
    "sound_samples": (100,),
    "copies_sound": True,
    "has_control": True,
    "control_scale": 0.5,
    "control_guidance_start": 0.25,
    "control_guidance_end": 0.75,
    "strength": 0.5,
    "num_layers": 3,
    "loras": (Lora(name="ink"),),
    "sound": False,
    "second_stage": SecondStage(scale=2.0, sigmas=(0.5,)),
    "cache": "medium",
    "key": "somebody else",
}


def forwards(encoder: PromptEncoder) -> list[str]:
    """Return a list that gets a name with each forward of one of the encoder's models."""
    calls: list[str] = []
    for name, part in vars(encoder._encoder._pipeline).items():
        if isinstance(part, nn.Module):
            part.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


def sent_pictures(seed: int) -> SentPictures:
    image = noise(128, 128)
    return SentPictures.of(InputPictures(pictures=(InputPicture.of(image.rotate(90 * seed)),)))


@pytest.fixture(scope="module")
def shipped() -> PromptEncoder:
    return PromptEncoder(spec_of(resolve_path("flux-shapes")))


def test_a_prompt_is_encoded_once_and_paints_the_same(shipped: PromptEncoder) -> None:
    checkpoint = Checkpoint.open("flux-shapes")
    pipeline = load_pipeline(checkpoint)
    first = checkpoint.defaults.request(prompt=PROMPT, num_inference_steps=2, seed=1)
    again = replace(first, seed=2, request_id="again")
    calls = forwards(shipped)
    assert not shipped.encode_valid(first).was_kept
    assert calls == ["text_encoder", "text_encoder_2"]
    encoded = shipped.encode_valid(again)
    assert encoded.was_kept
    assert len(calls) == 2

    def paint(conditioning: Conditioning) -> bytes:
        state = pipeline.sampler.begin(again, conditioning)
        for _ in range(2):
            state = pipeline.sampler.advance(state, pipeline.engine.predict(pipeline.sampler.branches(state), (0,)))
        return encode_frames(pipeline.decoder.decode(pipeline.sampler.latents(state), again), "png")

    assert paint(encoded.open()) == paint(pipeline.text_encoder.encode(again))
    for change in ({"prompt": "a green star"}, {"width": 96}, {"true_cfg_scale": 2.0, "negative_prompt": "blue"}):
        assert not shipped.encode_valid(replace(again, **change)).was_kept
    assert len(calls) > 2


def test_pictures_are_told_apart_by_their_pixels() -> None:
    encoder = PromptEncoder(spec_of(resolve_path("kontext-shapes")))
    request = Checkpoint.open("kontext-shapes").defaults.request(prompt=PROMPT)
    calls = forwards(encoder)
    first = encoder.encode_valid(request, sent_pictures(0))
    num_calls = len(calls)
    kept = encoder.encode_valid(replace(request, seed=3), sent_pictures(0))
    assert kept.was_kept
    assert len(calls) == num_calls > 0
    torch.testing.assert_close(tensors(kept.open()), tensors(first.open()), rtol=0, atol=0)
    assert not encoder.encode_valid(request, sent_pictures(1)).was_kept
    assert len(calls) > num_calls


def test_every_field_is_in_the_name_that_may_matter() -> None:
    assert {field.name for field in fields(MediaRequest)} == MATTERS.keys() | MATTERS_NOT.keys()
    known = CacheKeys.of(REQUEST, NO_SENT_PICTURES)
    for name, value in MATTERS_NOT.items():
        assert CacheKeys.of(replace(REQUEST, **{name: value}), NO_SENT_PICTURES).unseeded == known.unseeded, name
    others = [CacheKeys.of(replace(REQUEST, **{name: value}), NO_SENT_PICTURES) for name, value in MATTERS.items()]
    assert len({known.unseeded, *(one.unseeded for one in others)}) == 1 + len(others)


def test_a_mask_is_no_picture_and_a_form_is_no_other() -> None:
    one, mask = InputPicture.of(noise(8, 4, "L")), InputPicture.of(noise(8, 4, "L"))
    upright = replace(one, width=4, height=8)
    clip = InputVideo(width=4, height=4, num_frames=2, fps=8, data=bytes(range(96)))
    sound = InputSound(num_channels=2, rate=8, data=bytes(range(32)))
    inputs = [
        InputPictures(),
        InputPictures(pictures=(one,)),
        InputPictures(pictures=(upright,)),
        InputPictures(pictures=(one, mask)),
        InputPictures(pictures=(one,), mask=mask),
        InputPictures(pictures=(one,), control=mask),
        InputPictures(video=clip),
        InputPictures(video=replace(clip, data=clip.data[::-1])),
        InputPictures(video=replace(clip, width=2, height=8)),
        InputPictures(video=clip, further_videos=(clip,)),
        InputPictures(video=replace(clip, sound=sound)),
        InputPictures(video=replace(clip, sound=replace(sound, data=sound.data[::-1]))),
        InputPictures(video=replace(clip, sound=replace(sound, num_channels=1))),
    ]
    assert len({CacheKeys.of(REQUEST, SentPictures.of(each)).unseeded for each in inputs}) == len(inputs)


class Drawing:
    """An encoder that draws from the request's generator, or does not."""

    def __init__(self, *, draws: bool) -> None:
        self.num_calls, self._draws = 0, draws

    def encode(self, request: MediaRequest, pictures: Any) -> Conditioning:
        self.num_calls += 1
        state = NoiseState.of(torch.Generator().manual_seed(request.seed)) if self._draws else None
        return Conditioning(values={"x": torch.ones(4)}, kinds={}, dtype=torch.float32, noise=state)


class DrawingEncoder(PromptEncoder):
    def __init__(self, encoder: Drawing, max_bytes: int) -> None:
        self._encoder: Any = encoder
        self._weights = StageWeights(spec_of(resolve_path("flux-shapes")), "text_encoder")
        self._encoding, self._cache = Workers(1, "encoding"), ConditioningCache(max_bytes)


@pytest.mark.parametrize(("draws", "num_calls"), [(False, 1), (True, 2)])
def test_a_seed_matters_to_an_encoder_that_draws(draws: bool, num_calls: int) -> None:
    drawing = Drawing(draws=draws)
    encoder = DrawingEncoder(drawing, 10_000_000)
    for seed in (1, 2, 2, 1):
        encoder.encode(replace(REQUEST, seed=seed))
    assert drawing.num_calls == num_calls


def test_who_comes_together_is_encoded_once_and_nothing_is_kept_without_room() -> None:
    for max_bytes, num_calls in ((10_000_000, 1), (0, 8), (100, 8)):
        drawing = Drawing(draws=False)
        encoder, at_once = DrawingEncoder(drawing, max_bytes), threading.Barrier(8)

        def call(seed: int, encoder: PromptEncoder = encoder, at_once: threading.Barrier = at_once) -> None:
            at_once.wait()
            encoder.encode(replace(REQUEST, seed=seed))

        with ThreadPoolExecutor(8) as callers:
            list(callers.map(call, range(8)))
        assert drawing.num_calls == num_calls


def test_the_bound_holds_and_the_least_recently_used_goes() -> None:
    def encoded(num_bytes: int) -> Encoded:
        return Encoded(skeleton=b"", message=np.zeros(num_bytes, np.uint8), encode_s=0.0, shapes=())

    def keys(prompt: str) -> CacheKeys:
        return CacheKeys.of(replace(REQUEST, prompt=prompt), NO_SENT_PICTURES)

    room = 3 * (1000 + OVERHEAD_BYTES)
    cache = ConditioningCache(room)
    for prompt in "abc":
        cache.add(keys(prompt), encoded(1000), drew_noise=False)
    assert cache.num_bytes == room
    assert cache.find(keys("a"))
    cache.add(keys("d"), encoded(1000), drew_noise=False)
    cache.add(keys("d"), encoded(900), drew_noise=False)
    assert cache.num_bytes == room - 100
    assert [bool(cache.find(keys(prompt))) for prompt in "abcd"] == [True, False, True, True]
    cache.add(keys("e"), encoded(room), drew_noise=False)
    assert not cache.find(keys("e"))


def test_no_bytes_are_allowed(pictures: Path) -> None:
    encoder = PromptEncoder(spec_of(pictures, conditionings_mib=0))
    request = Checkpoint(pictures).defaults.request(prompt="a")
    assert [encoder.encode_valid(request).was_kept for _ in range(2)] == [False, False]
