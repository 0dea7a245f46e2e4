"""The same latents and pixels as ``diffusers.FluxPipeline``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.flux.latents import pack
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, load_pipeline
from tests.pipelines.sample_requests import picture

TOLERANCE = 1e-4
CPU = torch.device("cpu")


class Pair:
    """Our pipeline and theirs, from the same directory."""

    def __init__(self, path: Path) -> None:
        from diffusers import FluxPipeline

        self.ours: Pipeline = load_pipeline(path, CPU, torch.float32)
        self.theirs = FluxPipeline.from_pretrained(path)
        self.theirs.set_progress_bar_config(disable=True)

    def reference(self, request: MediaRequest, output_type: str) -> Any:
        guided = {"true_cfg_scale": request.true_cfg_scale, "negative_prompt": request.negative_prompt}
        return self.theirs(
            request.prompt,
            width=request.width,
            height=request.height,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            max_sequence_length=self.ours.text_encoder.max_tokens,
            generator=torch.Generator().manual_seed(request.seed),
            output_type=output_type,
            **(guided if request.true_cfg_scale > 1 else {}),
        ).images


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
    "true guidance, empty negative prompt": picture(true_cfg_scale=2.0),
    "negative prompt unused": picture(negative_prompt="green"),
    "other scale": picture(guidance_scale=7.0),
    "long prompt": picture(prompt="a very long prompt that does not fit into the tokens " * 3),
    "empty prompt": picture(prompt=""),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_latents_equal_diffusers(dev: Pair, name: str) -> None:
    request = REQUESTS[name]
    latents_BCHW = dev.ours.denoise(request)
    expected_BSD = dev.reference(request, "latent")
    assert expected_BSD.std() > 0.1
    torch.testing.assert_close(pack(latents_BCHW), expected_BSD, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["plain", "true guidance"])
def test_schnell_latents_equal_diffusers(schnell: Pair, name: str) -> None:
    request = REQUESTS[name]
    assert "guidance" not in schnell.ours.sampler.branches(next(schnell.ours.states(request)))[0].inputs
    torch.testing.assert_close(
        pack(schnell.ours.denoise(request)), schnell.reference(request, "latent"), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("name", ["plain", "true guidance"])
def test_pixels_equal_diffusers(dev: Pair, name: str) -> None:
    request = REQUESTS[name]
    expected_HWC = np.asarray(dev.reference(request, "pil")[0])
    frames = dev.ours.run(request)
    assert frames.shape == (1, request.height, request.width, 3)
    assert expected_HWC.std() > 10
    assert np.abs(frames[0].astype(int) - expected_HWC.astype(int)).max() <= 1
    assert (frames[0] != expected_HWC).mean() < 0.01


def test_bfloat16_equals_diffusers(tiny_flux: Path) -> None:
    from diffusers import FluxPipeline

    request = picture()
    ours = load_pipeline(tiny_flux, CPU, torch.bfloat16)
    theirs = FluxPipeline.from_pretrained(tiny_flux, dtype=torch.bfloat16)
    theirs.set_progress_bar_config(disable=True)
    expected_BSD = theirs(
        request.prompt,
        width=request.width,
        height=request.height,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        max_sequence_length=24,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="latent",
    ).images
    latents_BSD = pack(ours.denoise(request))
    assert latents_BSD.dtype == torch.bfloat16
    torch.testing.assert_close(latents_BSD.float(), expected_BSD.float(), rtol=0, atol=0.05)
