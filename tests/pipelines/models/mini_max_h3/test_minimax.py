"""MiniMax-H3 on gangs of Gloo ranks equals the pipeline's own call: clips with sound, from words and pictures."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from engines.core.packing import pack
from engines.core.shard_plan import named_like
from engines.core.tensors import relative_difference
from engines.parallel import strategies as strategies
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.models.mini_max_h3.spec import SHARD_PLAN
from pipelines.request import InputPicture, InputPictures, MediaRequest
from pipelines.run import Pipeline, load_pipeline
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import CONTEXT, TOLERANCE
from tests.pipelines.support.checkpoints.tiny_minimax import LOAD_PROCESSOR, MiniMaxProcessor, minimax_h3
from tests.pipelines.support.references.own_call import own_state
from tests.pipelines.support.references.video import Clip, Latents, denoised_from, picture, pictures_of

NAMES = ("latents", "audio_latents")


def own_latents(folder: Path, request: MediaRequest, images: tuple[Any, ...]) -> Latents:
    """Return diffusers' latents; it counts the end of the last step as one more."""
    shown = dict(zip(("image", "last_image"), images, strict=False))
    state = own_state(folder, request, **shown, num_inference_steps=request.num_inference_steps + 1)
    return {name: state.get(name) for name in NAMES}


SOME: dict[str, Any] = {"make": minimax_h3, "reference": own_latents, "sides": (2, 3), "num_latent_frames": 120}
CASES = {
    "words": Clip(**SOME, strategies=("tensor", "pipeline", "hybrid", "guidance")),
    "first frame": Clip(**SOME, num_pictures=1),
    "first and last frame": Clip(**SOME, num_pictures=2, strategies=("tensor",)),
}
STEADY = "first and last frame"
QUICK = {(STEADY, 4, "ulysses"), (STEADY, 4, "tensor")}
GANGS = [
    pytest.param(name, num_ranks, strategy, marks=() if (name, num_ranks, strategy) in QUICK else pytest.mark.slow)
    for name, case in CASES.items()
    for num_ranks in (1, 2, 4)
    for strategy in ((*CONTEXT, *case.strategies) if num_ranks > 1 else ("ulysses",))
    if (strategy, num_ranks) != ("pipeline", 4)
]


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(minimax_h3)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str], Latents]:
    def of(name: str) -> Latents:
        request = CASES[name].request(folder)
        with patch(LOAD_PROCESSOR, lambda *_, **__: MiniMaxProcessor()):
            return CASES[name].reference(folder, request, CASES[name].images(request))

    return cache(of)


def loaded(folder: Path) -> Pipeline:
    checkpoint = Checkpoint(folder)
    with patch(LOAD_PROCESSOR, lambda *_, **__: MiniMaxProcessor()):
        return load_pipeline(checkpoint, TorchEngine(checkpoint.denoiser(), strategy="ulysses"))


@cache
def encoded(folder: Path, name: str) -> bytes:
    """Return the pickled conditioning, made once in a process: strategies differ only after it."""
    request = CASES[name].request(folder)
    with patch(LOAD_PROCESSOR, lambda *_, **__: MiniMaxProcessor()):
        conditioning = Checkpoint(folder).text_encoder().encode(request, pictures_of(CASES[name].images(request)))
    pack(conditioning, torch.device("cpu"))
    return pickle.dumps(conditioning)


def without_exchange(folder: Path, request: MediaRequest, conditioning: bytes) -> dict[str, Any]:
    """Let each rank attend to its own tokens alone."""
    with patch.object(strategies, "ulysses", lambda kernel, axis, **_: kernel):
        return denoised_from(folder, request, conditioning, "ulysses")


@pytest.mark.parametrize(("name", "num_ranks", "strategy"), GANGS)
def test_latents_equal_the_pipelines_own(
    name: str, num_ranks: int, strategy: str, folder: Path, expected: Callable[[str], Latents]
) -> None:
    for latents in gang(num_ranks).run(
        denoised_from, folder, CASES[name].request(folder), encoded(folder, name), strategy
    ):
        for part, own in expected(name).items():
            assert own.std() > 0.1
            assert relative_difference(latents[part], own) <= TOLERANCE, part


def test_without_the_exchange_they_do_not(folder: Path, expected: Callable[[str], Latents]) -> None:
    for latents in gang(2).run(without_exchange, folder, CASES[STEADY].request(folder), encoded(folder, STEADY)):
        for part, own in expected(STEADY).items():
            assert relative_difference(latents[part], own) > 10 * TOLERANCE


def test_frames_and_sound_last_as_long_as_was_asked_for(folder: Path) -> None:
    """The model makes 124 frames; a preview decodes few of them."""
    pipeline, request = loaded(folder), CASES[STEADY].request(folder)
    *_, middle, last = pipeline.states(request, pictures_of(CASES[STEADY].images(request)))
    media = pipeline.decoder.decode_all(pipeline.sampler.latents(last), request)
    assert media.frames_FHWC.shape == (120, request.height, request.width, 3)
    assert media.sound is not None
    assert media.sound.samples_CT.shape == (2, round(207 * 8 * 120 / 124))
    silent = pipeline.decoder.decode_all(pipeline.sampler.latents(last), replace(request, sound=False))
    assert silent.sound is None
    assert np.array_equal(silent.frames_FHWC, media.frames_FHWC)
    preview = pipeline.decoder.preview(pipeline.sampler.preview(middle), request)
    assert preview.shape == (22, request.height, request.width, 3)


def test_a_step_leaves_its_state_as_it_was(folder: Path) -> None:
    pipeline, request = loaded(folder), CASES["words"].request(folder)
    state = pipeline.sampler.begin(request, pipeline.text_encoder.encode(request))
    before = state.loop_state.latents.clone()
    pipeline.sampler.advance(state, pipeline.engine.predict(pipeline.sampler.branches(state), (0,)))
    assert torch.equal(state.loop_state.latents, before)


@pytest.mark.parametrize("name", CASES)
def test_a_gang_prepares_with_blank_steps(name: str, folder: Path) -> None:
    """They have the inputs of real ones, except the tokens of words and of seen pictures."""
    checkpoint, request = Checkpoint(folder), CASES[name].request(folder)
    assert list(checkpoint.denoiser().modules) == ["transformer"]
    assert checkpoint.num_steps(request) == request.num_inference_steps
    (blank,) = checkpoint.first_step(request)
    pipeline = loaded(folder)
    encoded = pipeline.text_encoder.encode(request, pictures_of(CASES[name].images(request)))
    (real,) = pipeline.sampler.branches(pipeline.sampler.begin(request, encoded))
    assert {key: x.dtype for key, x in blank.inputs.items()} == {key: x.dtype for key, x in real.inputs.items()}
    assert blank.inputs["hidden_states"].shape == real.inputs["hidden_states"].shape
    assert len(checkpoint.denoiser().probe()) == 2


def test_a_frame_of_another_shape_is_cropped(folder: Path) -> None:
    request = CASES["first frame"].request(folder)
    wide = InputPicture.of(picture(160, 64, 3))
    with patch(LOAD_PROCESSOR, lambda *_, **__: MiniMaxProcessor()):
        encoder = Checkpoint(folder).text_encoder()
        shown = (wide, wide.cut_to(request.width, request.height))
        given, cut = (encoder.encode(request, InputPictures(pictures=(one,))).values for one in shown)
    assert torch.equal(given["condition_latents"][0], cut["condition_latents"][0])


def test_too_short_a_clip_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="num_frames is 119; it must be at least 120"):
        Checkpoint(folder).defaults.check_num_frames(119)


def test_the_plan_covers_the_published_size() -> None:
    """The class's defaults are the published model: 61.7 GiB in bfloat16."""
    from diffusers import MiniMaxH3Transformer3DModel

    with torch.device("meta"):
        module = MiniMaxH3Transformer3DModel()
    names = [name for name, _ in module.named_modules()]
    assert all(any(rule.matches(name) for name in names) for rule in SHARD_PLAN.linears)
    assert len(SHARD_PLAN.blocks_of(module)) == 50
    for place in (*(shard.module for shard in SHARD_PLAN.shards), *(one.module for one in SHARD_PLAN.gathers)):
        assert named_like(module, place)
    assert round(sum(weight.numel() for weight in module.parameters()) * 2 / 2**30, 1) == 61.7
