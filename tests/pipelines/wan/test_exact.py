"""The same latents and pixels as ``diffusers.WanPipeline``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.request import MediaRequest
from pipelines.run import Pipeline, load_pipeline
from tests.pipelines import tiny
from tests.pipelines.sample_requests import clip

TOLERANCE = 1e-4
CPU = torch.device("cpu")


class Pair:
    """Our pipeline and theirs, from the same directory."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        from diffusers import AutoencoderKLWan, WanPipeline

        self.ours: Pipeline = load_pipeline(path, CPU, dtype)
        vae = AutoencoderKLWan.from_pretrained(path / "vae")
        self.theirs = WanPipeline.from_pretrained(path, vae=vae, dtype=dtype)
        self.theirs.set_progress_bar_config(disable=True)

    def reference(self, request: MediaRequest, output_type: str) -> Any:
        return self.theirs(
            request.prompt,
            negative_prompt=request.negative_prompt,
            width=request.width,
            height=request.height,
            num_frames=request.num_frames,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.true_cfg_scale,
            max_sequence_length=self.ours.text_encoder.max_tokens,
            generator=torch.Generator().manual_seed(request.seed),
            output_type=output_type,
        ).frames


@pytest.fixture(scope="module")
def wan21(tiny_wan: Path) -> Pair:
    return Pair(tiny_wan)


REQUESTS = {
    "plain": clip(),
    "guided": clip(true_cfg_scale=4.0, negative_prompt="green, blurred", num_inference_steps=7),
    "guided, empty negative prompt": clip(true_cfg_scale=3.0),
    "one step": clip(num_inference_steps=1),
    "one frame": clip(num_frames=1, num_inference_steps=4),
    "more frames, tall": clip(num_frames=9, width=16, height=64, num_inference_steps=5),
    "long prompt": clip(prompt="a very long prompt that does not fit into the tokens " * 3),
    "unclean prompt": clip(prompt="  a red &amp;amp; blue \n\n star, itâ€™s big "),
    "empty prompt": clip(prompt=""),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_latents_equal_diffusers(wan21: Pair, name: str) -> None:
    check_latents(wan21, REQUESTS[name])


@pytest.mark.parametrize("name", ["plain", "guided"])
@pytest.mark.parametrize(
    "variant",
    [
        {"unipc": False},
        {"boundary_ratio": 0.875},
        {"expand_timesteps": True},
        {"unipc": False, "expand_timesteps": True},
    ],
    ids=str,
)
def test_variants_equal_diffusers(tmp_path: Path, variant: dict[str, Any], name: str) -> None:
    check_latents(Pair(tiny.wan(tmp_path, **variant)), REQUESTS[name])


def check_latents(pair: Pair, request: MediaRequest) -> None:
    expected_BCFHW = pair.reference(request, "latent")
    assert expected_BCFHW.std() > 0.1
    torch.testing.assert_close(pair.ours.denoise(request), expected_BCFHW, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["plain", "guided"])
def test_pixels_equal_diffusers(wan21: Pair, name: str) -> None:
    request = REQUESTS[name]
    expected_FHWC = np.round(np.asarray(wan21.reference(request, "np")[0]) * 255)
    frames = wan21.ours.run(request)
    assert frames.shape == (request.num_frames, request.height, request.width, 3)
    assert expected_FHWC.std() > 10
    assert np.abs(frames - expected_FHWC).max() <= 1
    assert (frames != expected_FHWC).mean() < 0.01


def test_preview_is_the_first_frame(wan21: Pair) -> None:
    request = REQUESTS["plain"]
    latents_BCFHW = wan21.ours.denoise(request)
    decoder = wan21.ours.decoder
    preview, frames = decoder.preview(latents_BCFHW, request), decoder.decode(latents_BCFHW, request)
    assert preview.shape[0] == 1
    assert np.abs(preview[0].astype(int) - frames[0].astype(int)).max() <= 1


def test_bfloat16_equals_diffusers(tiny_wan: Path) -> None:
    pair, request = Pair(tiny_wan, torch.bfloat16), REQUESTS["plain"]
    latents_BCFHW = pair.ours.denoise(request)
    assert latents_BCFHW.dtype == torch.float32
    torch.testing.assert_close(latents_BCFHW, pair.reference(request, "latent"), rtol=0, atol=0.05)
