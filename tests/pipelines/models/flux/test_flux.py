"""Latents and pixels equal those of ``diffusers.FluxPipeline``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.pipelines.support.references.pairs import Pair, check_latents, check_pixels
from tests.pipelines.support.sample_requests import picture


@pytest.fixture(scope="module")
def dev(tiny_flux: Path) -> Pair:
    return Pair(tiny_flux)


@pytest.fixture(scope="module")
def schnell(tiny_schnell: Path) -> Pair:
    return Pair(tiny_schnell)


REQUESTS = {
    "plain": picture(),
    "square": picture(width=64, height=64, seed=5),
    "one step": picture(num_inference_steps=1),
    "odd steps, tall": picture(num_inference_steps=7, width=24, height=80),
    "true guidance": picture(true_cfg_scale=4.0, negative_prompt="green", num_inference_steps=5),
    "true guidance, empty negative prompt": picture(true_cfg_scale=2.0, negative_prompt=""),
    "true guidance, nothing to avoid": picture(true_cfg_scale=2.0),
    "negative prompt unused": picture(negative_prompt="green"),
    "other scale": picture(guidance_scale=7.0),
    "long prompt": picture(prompt="a very long prompt that does not fit into the tokens " * 3),
    "empty prompt": picture(prompt=""),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_latents_equal_diffusers(dev: Pair, name: str) -> None:
    check_latents(dev, REQUESTS[name])


@pytest.mark.parametrize("name", ["plain", "true guidance"])
def test_schnell_latents_equal_diffusers(schnell: Pair, name: str) -> None:
    state = next(schnell.ours.states(REQUESTS[name]))
    assert "guidance" not in schnell.ours.sampler.branches(state)[0].inputs
    check_latents(schnell, REQUESTS[name])


@pytest.mark.parametrize("name", ["plain", "true guidance"])
def test_pixels_equal_diffusers(dev: Pair, name: str) -> None:
    check_pixels(dev, REQUESTS[name])


def test_bfloat16_equals_diffusers(tiny_flux: Path) -> None:
    pair = Pair(tiny_flux, torch.bfloat16)
    assert pair.ours.denoise(REQUESTS["plain"])["latents"].dtype == torch.bfloat16
    check_latents(pair, REQUESTS["plain"], tolerance=0.05)
