"""States are values, jobs do not disturb each other, and previews approach the picture."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from pipelines.blocks.opened import OpenedPipeline
from pipelines.checkpoint import Checkpoint
from pipelines.request import InputPicture, InputPictures
from pipelines.run import Pipeline, load_pipeline
from tests.pipelines.support.sample_requests import clip, picture

CPU = torch.device("cpu")
REQUESTS = {"flux": picture, "wan": clip}


@pytest.fixture(params=REQUESTS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pipeline(name: str, tiny_flux: Path, tiny_wan: Path) -> Pipeline:
    return load_pipeline(Checkpoint({"flux": tiny_flux, "wan": tiny_wan}[name]))


def begin(pipeline: Pipeline, name: str, **changes: Any) -> Any:
    request = REQUESTS[name](**changes)
    return pipeline.sampler.begin(request, pipeline.text_encoder.encode(request))


def latents_of(pipeline: Pipeline, state: Any) -> Tensor:
    latents: Tensor = pipeline.sampler.latents(state)["latents"]
    return latents


def preview_of(pipeline: Pipeline, state: Any) -> Tensor:
    latents: Tensor = pipeline.sampler.preview(state)["latents"]
    return latents


def step(pipeline: Pipeline, state: Any) -> Any:
    return pipeline.sampler.advance(state, pipeline.engine.predict(pipeline.sampler.branches(state), (0,)))


def run(pipeline: Pipeline, state: Any) -> Tensor:
    for _ in range(pipeline.sampler.num_steps(state)):
        state = step(pipeline, state)
    return latents_of(pipeline, state)


def test_a_step_leaves_its_state_as_it_was(pipeline: Pipeline, name: str) -> None:
    state = step(pipeline, step(pipeline, begin(pipeline, name, num_inference_steps=6)))
    before = latents_of(pipeline, state).clone()
    once, again = step(pipeline, state), step(pipeline, state)
    assert torch.equal(latents_of(pipeline, state), before)
    assert torch.equal(latents_of(pipeline, once), latents_of(pipeline, again))
    assert torch.equal(run_rest(pipeline, once), run_rest(pipeline, again))


def run_rest(pipeline: Pipeline, state: Any) -> Tensor:
    for _ in range(state.step, pipeline.sampler.num_steps(state)):
        state = step(pipeline, state)
    return latents_of(pipeline, state)


def test_interleaved_jobs_equal_separate_ones(pipeline: Pipeline, name: str) -> None:
    jobs: list[dict[str, Any]] = [
        {"seed": 1, "num_inference_steps": 4},
        {"seed": 2, "true_cfg_scale": 3.0, "num_inference_steps": 4},
    ]
    expected = [run(pipeline, begin(pipeline, name, **job)) for job in jobs]
    states = [begin(pipeline, name, **job) for job in jobs]
    for _ in range(4):
        states = [step(pipeline, state) for state in states]
    for state, latents in zip(states, expected, strict=True):
        assert torch.equal(latents_of(pipeline, state), latents)


def test_requests_matter(pipeline: Pipeline, name: str) -> None:
    """Every field that should change the picture does, so the comparisons with diffusers mean something."""
    guided = {"true_cfg_scale": 2.0, "negative_prompt": ""}
    base = run(pipeline, begin(pipeline, name, **guided))
    changes: list[dict[str, Any]] = [
        {"prompt": "blue"},
        {"negative_prompt": "blue"},
        {"seed": 3},
        {"true_cfg_scale": 3.0},
    ]
    for change in [*changes, *([{"guidance_scale": 9.0}] if name == "flux" else [])]:
        latents = run(pipeline, begin(pipeline, name, **{**guided, **change}))
        assert (latents - base).abs().max() > 0.01, change


def test_previews_have_the_shape_of_latents_and_end_in_them(pipeline: Pipeline, name: str) -> None:
    state = begin(pipeline, name, num_inference_steps=6)
    noise = latents_of(pipeline, state)
    assert torch.equal(preview_of(pipeline, state), noise), "there is nothing else before the first step"
    previews = []
    for _ in range(6):
        state = step(pipeline, state)
        previews.append(preview_of(pipeline, state))
    finished = latents_of(pipeline, state)
    errors = [float((preview - finished).abs().mean()) for preview in previews]
    assert all(preview.shape == finished.shape for preview in previews)
    assert errors[-1] == 0
    assert errors[-2] < errors[0]


def test_previews_of_a_picture_that_is_painted_over_end_in_it_too(tiny_flux: Path) -> None:
    """The steps of an image-to-image job are the last of a schedule."""
    pipeline, request = (
        load_pipeline(Checkpoint(tiny_flux)),
        picture(num_inference_steps=6, strength=0.5, num_pictures=1),
    )
    given = InputPicture(width=48, height=32, mode="RGB", data=bytes(range(256)) * 18)
    *_, last = pipeline.states(request, InputPictures(pictures=(given,)))
    assert len(last.steps) == 3
    assert torch.equal(preview_of(pipeline, last), latents_of(pipeline, last))


@pytest.mark.parametrize("truth", [0.7])
def test_a_preview_is_exact_when_the_velocity_is(pipeline: Pipeline, name: str, truth: float) -> None:
    """On a straight path from noise to a constant picture, ``v = noise - x0`` and every estimate is ``x0``."""
    sampler, state = pipeline.sampler, begin(pipeline, name, num_inference_steps=5)
    tokens = sampler.branches(state)[0].inputs["hidden_states"]
    for _ in range(3):
        state = sampler.advance(state, (tokens - truth,))
        preview = preview_of(pipeline, state)
        torch.testing.assert_close(preview, torch.full_like(preview, truth))


def test_states_travel(pipeline: Pipeline, name: str) -> None:
    state = step(pipeline, begin(pipeline, name))
    copied = pickle.loads(pickle.dumps(state))
    assert torch.equal(run_rest(pipeline, copied), run_rest(pipeline, state))


def test_one_branch_without_guidance_two_with(pipeline: Pipeline, name: str) -> None:
    assert len(pipeline.sampler.branches(begin(pipeline, name))) == 1
    branches = pipeline.sampler.branches(begin(pipeline, name, true_cfg_scale=1.5, negative_prompt=""))
    assert len(branches) == 2
    assert {key for key in branches[0].inputs if branches[0].inputs[key] is not branches[1].inputs[key]} <= {
        "encoder_hidden_states",
        "pooled_projections",
        "hidden_states",
        "timestep",
    }


def test_noise_is_drawn_the_same_everywhere(pipeline: Pipeline, name: str) -> None:
    first, second = begin(pipeline, name), begin(pipeline, name)
    assert torch.equal(latents_of(pipeline, first), latents_of(pipeline, second))


def test_a_jobs_timesteps_are_found_when_they_are_asked_for(pipeline: Pipeline, name: str) -> None:
    """They are computed once a job, and are equal after a move; engines without a use for them never ask."""
    sampler = pipeline.sampler
    with patch.object(sampler, "_record_timesteps", wraps=sampler._record_timesteps) as noted:
        state = begin(pipeline, name, num_inference_steps=3)
        later = step(pipeline, step(pipeline, state))
        assert noted.call_count == 0
        schedules = [sampler.branches(one)[0].schedule for one in (state, later)]
        if name == "wan":  # it has no hand-ordered step
            assert schedules == [None, None]
            return
        first, second = (schedule.timesteps_S for schedule in schedules if schedule is not None)
        assert first is second
        assert noted.call_count == 1
        own_S = torch.cat(
            [sampler.branches(one)[0].inputs["timestep"] for one in (state, step(pipeline, state), later)]
        )
        assert torch.equal(first, own_S)
        moved = sampler.branches(pickle.loads(pickle.dumps(later)))[0].schedule
        assert moved is not None
        assert torch.equal(moved.timesteps_S, first)


def test_a_pipeline_without_users_is_released_at_once(tiny_flux: Path) -> None:
    """It does not wait for the garbage collector, until which unused weights would stay."""
    opened = OpenedPipeline(tiny_flux, CPU, torch.float32)
    assert opened.for_ranks is not None
    gone = weakref.ref(opened)
    gc.disable()
    try:
        del opened
        assert gone() is None
    finally:
        gc.enable()
