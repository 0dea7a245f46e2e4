"""Latents and pixels equal those of ``diffusers.WanPipeline``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pipelines.support.checkpoints import tiny
from tests.pipelines.support.references.pairs import Pair, check_latents, check_pixels
from tests.pipelines.support.sample_requests import clip


@pytest.fixture(scope="module")
def wan21(tiny_wan: Path) -> Pair:
    return Pair(tiny_wan)


REQUESTS = {
    "plain": clip(),
    "guided": clip(true_cfg_scale=4.0, negative_prompt="green, blurred", num_inference_steps=7),
    "guided, nothing to avoid": clip(true_cfg_scale=3.0),
    "guided, empty negative prompt": clip(true_cfg_scale=3.0, negative_prompt=""),
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


VARIANTS: list[dict[str, Any]] = [
    {"unipc": False},
    {"boundary_ratio": 0.875},
    {"expand_timesteps": True},
    {"unipc": False, "expand_timesteps": True},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_variants_equal_diffusers(tmp_path: Path, variant: dict[str, Any]) -> None:
    pair = Pair(tiny.wan(tmp_path, **variant))
    for name in ("plain", "guided"):
        check_latents(pair, REQUESTS[name])


def test_the_second_transformer_takes_the_late_steps(tmp_path: Path) -> None:
    ours = Pair(tiny.wan22(tmp_path)).ours
    used = [ours.sampler.branches(state)[0].module for state in list(ours.states(REQUESTS["guided"]))[:-1]]
    assert used == sorted(used)
    assert set(used) == {"transformer", "transformer_2"}


@pytest.mark.parametrize("name", ["plain", "guided"])
def test_pixels_equal_diffusers(wan21: Pair, name: str) -> None:
    check_pixels(wan21, REQUESTS[name])


def test_preview_is_the_first_frame(wan21: Pair) -> None:
    request, decoder = REQUESTS["plain"], wan21.ours.decoder
    latents_BCFHW = wan21.ours.denoise(request)
    preview, frames = decoder.preview(latents_BCFHW, request), decoder.decode(latents_BCFHW, request)
    assert preview.shape[0] == 1
    assert np.abs(preview[0].astype(int) - frames[0].astype(int)).max() <= 1


def test_bfloat16_equals_diffusers(tiny_wan: Path) -> None:
    pair = Pair(tiny_wan, torch.bfloat16)
    assert pair.ours.denoise(REQUESTS["plain"])["latents"].dtype == torch.float32
    check_latents(pair, REQUESTS["plain"], tolerance=0.05)
