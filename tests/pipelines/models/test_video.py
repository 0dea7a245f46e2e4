"""Clips of every model on gangs of Gloo ranks, with every strategy of its plan, equal diffusers' own."""

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
from torch import Tensor

from engines.core.packing import pack
from engines.core.tensors import relative_difference
from engines.parallel import strategies as strategies
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, load_pipeline
from pipelines.size import Size
from pipelines.solver import Solver
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import CONTEXT, TOLERANCE
from tests.pipelines.support.checkpoints import tiny, tiny_hunyuan, tiny_ltx, tiny_video
from tests.pipelines.support.references import own_clips as own_clips
from tests.pipelines.support.references.video import Clip, Latents, denoised_from, encoded, picture, pictures_of

pytestmark = pytest.mark.slow


CLIPS = {
    "wan 2.1 from a picture": Clip(
        make=tiny_video.wan_picture, reference=own_clips.blocks, num_pictures=1, strategies=("tensor",)
    ),
    "wan 2.1 from first and last frame": Clip(
        make=tiny_video.wan_first_and_last, reference=own_clips.wan_pipeline, num_pictures=2, strategies=("tensor",)
    ),
    "wan 2.2 from a picture": Clip(
        make=tiny_video.wan_picture_two_experts,
        reference=own_clips.blocks,
        num_pictures=1,
        strategies=("tensor",),
    ),
    "wan 2.2 with a timestep a token, from a picture": Clip(
        make=tiny.wan_per_token, reference=own_clips.wan_pipeline, num_pictures=1, strategies=("tensor",)
    ),
    "ltx from words": Clip(make=tiny_ltx.ltx, reference=own_clips.timed_blocks, strategies=("pipeline", "tensor")),
    "ltx from words without guidance": Clip(
        make=tiny_ltx.ltx, reference=own_clips.ltx_pipeline, changes={"true_cfg_scale": 1.0}
    ),
    "ltx from a picture": Clip(make=tiny_ltx.ltx, reference=own_clips.timed_blocks, num_pictures=1),
    "ltx 2 from words, all passes": Clip(
        make=tiny_ltx.ltx2, reference=own_clips.sounding_blocks, strategies=("pipeline", "tensor")
    ),
    "ltx 2 from words without guidance, with sigmas": Clip(
        make=tiny_ltx.ltx2_few_layers,
        reference=own_clips.sounding_blocks,
        strategies=("hybrid",),
        changes={"true_cfg_scale": 1.0, "solver": Solver(sigmas=(1.0, 0.4))},
    ),
    "ltx 2, gated and turned as a whole": Clip(
        make=tiny_ltx.ltx2_gated,
        reference=own_clips.sounding_blocks,
        strategies=("tensor", "tensor2xulysses"),
        changes={"true_cfg_scale": 1.0},
    ),
    "ltx 2 from a picture": Clip(make=tiny_ltx.ltx2_few_layers, reference=own_clips.sounding_blocks, num_pictures=1),
    "hunyuan from words": Clip(
        make=tiny_hunyuan.hunyuan_video, reference=own_clips.hunyuan_blocks, strategies=("tensor",)
    ),
    "hunyuan with words to write, without guidance": Clip(
        make=tiny_hunyuan.hunyuan_video,
        reference=own_clips.hunyuan_pipeline,
        changes={"true_cfg_scale": 1.0, "prompt": 'a sign that says "hello"'},
    ),
    "hunyuan from a picture": Clip(
        make=tiny_hunyuan.hunyuan_video_picture,
        reference=own_clips.hunyuan_blocks,
        num_pictures=1,
        strategies=("tensor",),
    ),
}


@pytest.fixture(scope="module")
def expected(folders: Callable[[Any], Path]) -> Callable[[str], Latents]:
    return cache(lambda name: CLIPS[name].own(folders(CLIPS[name].make)))


def largest_difference(latents: Latents, expected: Latents) -> float:
    names = [name for name in expected if name.endswith("latents")]
    return max(relative_difference(latents[name], expected[name]) for name in names)


def without_exchange(folder: Path, request: MediaRequest, conditioning: bytes) -> dict[str, Tensor]:
    """Let each rank attend to its own tokens alone."""
    with patch.object(strategies, "ulysses", lambda kernel, axis, **_: kernel):
        return denoised_from(folder, request, conditioning, "ulysses")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CLIPS)
def test_latents_equal_diffusers(
    name: str, num_ranks: int, folders: Callable[[Any], Path], expected: Callable[[str], Latents]
) -> None:
    clip, folder = CLIPS[name], folders(CLIPS[name].make)
    request = clip.request(folder)
    assert all(latents.std() > 0.1 for latents in expected(name).values())
    several = (*CONTEXT, *clip.strategies) if num_ranks > 1 else ("ulysses",)
    for strategy in several:
        for latents in gang(num_ranks).run(
            denoised_from, folder, request, encoded(folder, request, pictures_of(clip.images(request))), strategy
        ):
            assert largest_difference(latents, expected(name)) <= TOLERANCE, strategy


@pytest.mark.parametrize("name", CLIPS)
def test_without_the_exchange_they_do_not(
    name: str, folders: Callable[[Any], Path], expected: Callable[[str], Latents]
) -> None:
    clip, folder = CLIPS[name], folders(CLIPS[name].make)
    request = clip.request(folder)
    for latents in gang(2).run(
        without_exchange, folder, request, encoded(folder, request, pictures_of(clip.images(request)))
    ):
        assert largest_difference(latents, expected(name)) > 10 * TOLERANCE


@pytest.fixture(scope="module", params=CLIPS)
def loaded(request: pytest.FixtureRequest, folders: Callable[[Any], Path]) -> tuple[Clip, MediaRequest, Pipeline]:
    clip = CLIPS[request.param]
    folder = folders(clip.make)
    return clip, clip.request(folder), load_pipeline(Checkpoint(folder))


def finish(pipeline: Pipeline, state: Any) -> Latents:
    for _ in range(state.step, pipeline.sampler.num_steps(state)):
        state = pipeline.sampler.advance(state, pipeline.engine.predict(pipeline.sampler.branches(state), (0,)))
    return pipeline.sampler.latents(state)


def test_a_job_moves_between_ranks(loaded: tuple[Clip, MediaRequest, Pipeline]) -> None:
    """Its conditioning and its state are values, before the first step and after one."""
    clip, request, pipeline = loaded
    conditioning = pipeline.text_encoder.encode(request, pictures_of(clip.images(request)))
    state = pipeline.sampler.begin(request, pickle.loads(pickle.dumps(conditioning)))
    pack((conditioning, state), torch.device("cpu"))
    moved = pipeline.sampler.advance(state, pipeline.engine.predict(pipeline.sampler.branches(state), (0,)))
    moved = pickle.loads(pickle.dumps(moved))
    for name, value in finish(pipeline, state).items():
        if isinstance(value, Tensor):
            assert torch.equal(value, finish(pipeline, moved)[name]), name


def test_frames_are_of_the_size_that_was_asked_for(loaded: tuple[Clip, MediaRequest, Pipeline]) -> None:
    """The shape of input pictures does not matter. A preview has this size too, and one frame is enough."""
    clip, request, pipeline = loaded
    images = tuple(picture(90, 50, seed) for seed in range(clip.num_pictures))
    *_, before, state = pipeline.states(request, pictures_of(images))
    frames = pipeline.decoder.decode(pipeline.sampler.latents(state), request)
    assert frames.shape == (request.num_frames, request.height, request.width, 3)
    assert frames.dtype == np.uint8
    assert frames.std() > 1
    preview = pipeline.decoder.preview(pipeline.sampler.preview(before), request)
    assert preview.shape[1:] == frames.shape[1:]
    assert len(preview) < request.num_frames


def test_pictures_matter(loaded: tuple[Clip, MediaRequest, Pipeline]) -> None:
    clip, request, pipeline = loaded
    images = clip.images(request)
    latents = pipeline.denoise(request, pictures_of(images))["latents"]
    for place in range(len(images)):
        other = (*images[:place], picture(request.width, request.height, 7), *images[place + 1 :])
        assert relative_difference(pipeline.denoise(request, pictures_of(other))["latents"], latents) > 0.01


def test_a_gang_prepares_with_blank_pictures(loaded: tuple[Clip, MediaRequest, Pipeline]) -> None:
    """Blank steps have the shapes of real ones."""
    clip, request, pipeline = loaded
    checkpoint = Checkpoint(pipeline.sampler._opened.path)
    state = pipeline.sampler.begin(request, pipeline.text_encoder.encode(request, pictures_of(clip.images(request))))
    for blank, real in zip(checkpoint.first_step(request), pipeline.sampler.branches(state), strict=True):
        assert blank.constants == real.constants
        shapes = [{name: (x.shape, x.dtype) for name, x in one.inputs.items()} for one in (blank, real)]
        assert shapes[0] == shapes[1]
    probe = checkpoint.denoiser().probe()
    assert len(probe) == 2
    pipeline.engine.predict(probe, (0,))
    assert replace(probe[0]).inputs.keys() == pipeline.sampler.branches(state)[0].inputs.keys()


@pytest.mark.parametrize("fps", [24, 50, 120])
def test_one_frame_at_a_high_rate_has_a_token_of_sound(fps: int, folders: Callable[[Any], Path]) -> None:
    checkpoint = Checkpoint(folders(tiny_ltx.ltx2_few_layers))
    request = checkpoint.defaults.request(Size(width=64, height=64, num_frames=1), fps=fps)
    assert {branch.inputs["audio_hidden_states"].shape[1] for branch in checkpoint.first_step(request)} == {1}


def test_a_clip_whose_latents_cannot_be_mirrored_is_refused(folders: Callable[[Any], Path]) -> None:
    """All its steps would run, and then no auto-encoder could decode it."""
    checkpoint = Checkpoint(folders(tiny_ltx.ltx2_few_layers))
    smallest = checkpoint.defaults.request(Size(width=64, height=64, num_frames=1))
    assert checkpoint.decoder().decode(checkpoint.first_latents(smallest), smallest).shape == (1, 64, 64, 3)
    with pytest.raises(ValueError, match="size is 96x32; width and height must be at least 64"):
        checkpoint.defaults.request(Size(width=96, height=32, num_frames=1))
    assert str(checkpoint.defaults.nearest_size(300, 20)) == "288x64"
