"""The trained checkpoints that ship run exactly as in diffusers, with suitable defaults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.attention_error import attention_errors
from engines.torch_engine.checks import MAX_ATTENTION_ERROR
from pipelines.checkpoint import Checkpoint
from pipelines.loading import resolve_path, shipped_checkpoints
from pipelines.request import MediaRequest
from tests.pipelines.support.references.pairs import Pair, check_latents, check_pixels

PROMPTS = {"image": "a large red circle in the centre", "video": "a red circle moves from left to right"}


FROM_WORDS = [name for name in shipped_checkpoints() if not Checkpoint.open(name).defaults.min_pictures]


@pytest.fixture(params=FROM_WORDS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(name: str) -> Pair:
    return Pair(resolve_path(name))


def default_request(name: str) -> MediaRequest:
    defaults = Checkpoint.open(name).defaults
    return defaults.request(model=name, prompt=PROMPTS[defaults.kind], num_inference_steps=3, seed=11)


def small(request: MediaRequest) -> MediaRequest:
    return replace(request, width=64, height=96, num_frames=min(request.num_frames, 5), num_inference_steps=5)


def test_defaults_are_within_the_limits(name: str) -> None:
    checkpoint = Checkpoint.open(name)
    assert (checkpoint.path / "troupe.json").is_file()
    checkpoint.defaults.check(default_request(name))


def test_latents_equal_diffusers(pair: Pair, name: str) -> None:
    request = default_request(name)
    check_latents(pair, request)
    check_latents(pair, replace(small(request), true_cfg_scale=3.0, negative_prompt="blue"))
    check_latents(pair, replace(small(request), true_cfg_scale=1.0))


def test_attention_in_float8_costs_no_more_than_documented(pair: Pair, name: str) -> None:
    errors = attention_errors(pair.ours, default_request(name))
    assert 0.02 < errors.layer_median < 0.05
    assert 0.02 < errors.step_median < 0.05
    assert max(errors.layer_max, errors.step_max) < 0.08 < MAX_ATTENTION_ERROR
    assert 0.005 < errors.latents < 0.15


def test_pixels_equal_diffusers(pair: Pair, name: str) -> None:
    check_pixels(pair, small(default_request(name)))


@pytest.mark.parametrize("colour", ["red", "blue"])
def test_prompts_decide_the_colours(pair: Pair, name: str, colour: str) -> None:
    """The trained model draws a shape of the requested colour, and none of the other."""
    request = replace(default_request(name), num_inference_steps=8)
    prompt = request.prompt.replace("red", colour) + " on a grey background"
    shares = shares_of_colours(pair.ours.run(replace(request, prompt=prompt)))
    other = {"red": "blue", "blue": "red"}[colour]
    assert shares[colour] > 0.01
    assert shares[other] < 0.2 * shares[colour]


def shares_of_colours(frames_FHWC: NDArray[np.uint8]) -> dict[str, float]:
    """Return the shares of the picture that are strongly red (orange is not), and strongly blue."""
    red, green, blue = np.moveaxis(frames_FHWC.astype(int), -1, 0)
    return {
        "red": float(((red - green > 110) & (red - blue > 110)).mean()),
        "blue": float(((blue - green > 80) & (blue - red > 80)).mean()),
    }
