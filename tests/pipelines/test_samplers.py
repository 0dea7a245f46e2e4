"""States are values, jobs do not disturb each other, and previews approach the picture."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipelines.checkpoint import Checkpoint
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


def step(pipeline: Pipeline, state: Any) -> Any:
    return pipeline.sampler.advance(state, pipeline.engine.predict(pipeline.sampler.branches(state), (0,)))


def run(pipeline: Pipeline, state: Any) -> Tensor:
    for _ in range(pipeline.sampler.num_steps(state)):
        state = step(pipeline, state)
    return pipeline.sampler.latents(state)


def test_a_step_leaves_its_state_as_it_was(pipeline: Pipeline, name: str) -> None:
    state = step(pipeline, step(pipeline, begin(pipeline, name, num_inference_steps=6)))
    before = pipeline.sampler.latents(state).clone()
    once, again = step(pipeline, state), step(pipeline, state)
    assert torch.equal(pipeline.sampler.latents(state), before)
    assert torch.equal(pipeline.sampler.latents(once), pipeline.sampler.latents(again))
    assert torch.equal(run_rest(pipeline, once), run_rest(pipeline, again))


def run_rest(pipeline: Pipeline, state: Any) -> Tensor:
    for _ in range(state.step, pipeline.sampler.num_steps(state)):
        state = step(pipeline, state)
    return pipeline.sampler.latents(state)


def test_interleaved_jobs_equal_separate_ones(pipeline: Pipeline, name: str) -> None:
    jobs = [{"seed": 1, "num_inference_steps": 4}, {"seed": 2, "true_cfg_scale": 3.0, "num_inference_steps": 4}]
    expected = [run(pipeline, begin(pipeline, name, **job)) for job in jobs]
    states = [begin(pipeline, name, **job) for job in jobs]
    for _ in range(4):
        states = [step(pipeline, state) for state in states]
    for state, latents in zip(states, expected, strict=True):
        assert torch.equal(pipeline.sampler.latents(state), latents)


def test_requests_matter(pipeline: Pipeline, name: str) -> None:
    """Every field that should change the picture does, so the comparisons with diffusers compare something."""
    base = run(pipeline, begin(pipeline, name, true_cfg_scale=2.0))
    changes = [{"prompt": "blue"}, {"negative_prompt": "blue"}, {"seed": 3}, {"true_cfg_scale": 3.0}]
    for change in [*changes, *([{"guidance_scale": 9.0}] if name == "flux" else [])]:
        latents = run(pipeline, begin(pipeline, name, **{"true_cfg_scale": 2.0, **change}))
        assert (latents - base).abs().max() > 0.01, change


def test_previews_have_the_shape_of_latents_and_end_in_them(pipeline: Pipeline, name: str) -> None:
    sampler, state = pipeline.sampler, begin(pipeline, name, num_inference_steps=6)
    assert torch.equal(sampler.preview(state), sampler.latents(state)), "nothing but noise before the first step"
    previews = []
    for _ in range(6):
        state = step(pipeline, state)
        previews.append(sampler.preview(state))
    finished = sampler.latents(state)
    errors = [float((preview - finished).abs().mean()) for preview in previews]
    assert all(preview.shape == finished.shape for preview in previews)
    assert errors[-1] == 0
    assert errors[-2] < errors[0]


@pytest.mark.parametrize("truth", [0.7])
def test_a_preview_is_exact_when_the_velocity_is(pipeline: Pipeline, name: str, truth: float) -> None:
    """On a straight way from noise to a constant picture, ``v = noise - x0`` and every estimate is ``x0``."""
    sampler, state = pipeline.sampler, begin(pipeline, name, num_inference_steps=5)
    tokens = sampler.branches(state)[0].inputs["hidden_states"]
    for _ in range(3):
        state = sampler.advance(state, (tokens - truth,))
        torch.testing.assert_close(sampler.preview(state), torch.full_like(sampler.preview(state), truth))


def test_states_travel(pipeline: Pipeline, name: str) -> None:
    state = step(pipeline, begin(pipeline, name))
    copied = pickle.loads(pickle.dumps(state))
    assert torch.equal(run_rest(pipeline, copied), run_rest(pipeline, state))


def test_one_branch_without_guidance_two_with(pipeline: Pipeline, name: str) -> None:
    assert len(pipeline.sampler.branches(begin(pipeline, name))) == 1
    branches = pipeline.sampler.branches(begin(pipeline, name, true_cfg_scale=1.5))
    assert len(branches) == 2
    assert {key for key in branches[0].inputs if branches[0].inputs[key] is not branches[1].inputs[key]} <= {
        "encoder_hidden_states",
        "pooled_projections",
        "hidden_states",
        "timestep",
    }


def test_sizes_off_the_grid_are_refused(pipeline: Pipeline, name: str) -> None:
    with pytest.raises(ValueError, match="multiples of"):
        begin(pipeline, name, width=37)
    if name == "wan":
        with pytest.raises(ValueError, match=r"num_frames is 6; it must be 1 \+ a multiple of 4, such as 5"):
            begin(pipeline, name, num_frames=6)
        with pytest.raises(ValueError, match="too large"):
            begin(pipeline, name, width=16 * 65)


def test_noise_is_drawn_the_same_everywhere(pipeline: Pipeline, name: str) -> None:
    first, second = begin(pipeline, name), begin(pipeline, name)
    assert torch.equal(pipeline.sampler.latents(first), pipeline.sampler.latents(second))
    other = dataclasses.replace(pipeline.sampler, device=torch.device("meta"))
    request = REQUESTS[name]()
    assert other.begin(request, pipeline.text_encoder.encode(request)).step == 0, "no value is read from the device"
