"""LTX-2.5 with its auto-encoder, on gangs of Gloo ranks, equals diffusers' own calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2Pipeline, LTX25AutoBlocks
from diffusers.modular_pipelines.ltx2.modular_blocks_ltx2 import LTX2AutoDecoderStep

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.directory import read_index
from pipelines.loading import unused_weights
from pipelines.preconditions import weight_problems
from pipelines.request import MediaRequest
from pipelines.run import load_pipeline
from pipelines.size import Size
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import TOLERANCE
from tests.pipelines.support.checkpoints import tiny_ltx
from tests.pipelines.support.references import own_clips
from tests.pipelines.support.references.video import denoised_from, encoded, picture, pictures_of

SIDES = (64, 96)
STRATEGIES = {1: ("ulysses",), 2: ("ulysses", "tensor", "pipeline")}
LEFT_OUT = {"LTX2DurationHead", "LTX2VideoDiffusionDecoderModel"}


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_ltx.ltx25)


@pytest.fixture(scope="module")
def modular(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_ltx.ltx25_modular)


def request_of(folder: Path, **changes: Any) -> MediaRequest:
    height, width = SIDES
    words = {"prompt": "a red circle", "negative_prompt": "blue", "true_cfg_scale": 1.0}
    more = {"num_inference_steps": 2, "seed": 5, **words, **changes}
    return Checkpoint(folder).defaults.request(Size(width=width, height=height, num_frames=5), **more)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_latents_equal_those_of_the_classic_pipeline(num_ranks: int, folder: Path, modular: Path) -> None:
    request = request_of(folder)
    expected = own_clips.ltx2_tokens(LTX2Pipeline, folder, request)
    assert expected.std() > 0.1
    for path in (folder, modular):
        for strategy in STRATEGIES[num_ranks]:
            for values in gang(num_ranks).run(
                denoised_from, path, request, encoded(path, request, pictures_of(())), strategy
            ):
                assert relative_difference(values["latents"], expected) <= TOLERANCE, strategy


@pytest.mark.parametrize("num_pictures", [0, 1])
def test_a_clip_and_its_sound_are_those_of_the_blocks_with_the_other_decoder(num_pictures: int, modular: Path) -> None:
    request = request_of(modular, num_pictures=num_pictures, true_cfg_scale=3.0)
    images = tuple(picture(SIDES[1], SIDES[0], seed) for seed in range(num_pictures))
    blocks = LTX25AutoBlocks()
    blocks.sub_blocks["decode"] = LTX2AutoDecoderStep()
    own = own_clips.sounding_blocks(modular, request, images, pipeline=blocks.init_pipeline(str(modular)))
    pipeline = load_pipeline(Checkpoint(modular))
    made = pipeline.denoise(request, pictures_of(images))
    assert torch.equal(made["latents"], own["latents"])
    assert torch.equal(made["audio_latents"], own["audio_latents"])
    frames = 255 * own["videos"][0].movedim(1, -1).float().numpy()
    assert np.abs(pipeline.decoder.decode(made, request).astype(float) - frames).max() <= 1


def test_parts_that_no_request_needs_are_not_loaded(folder: Path, modular: Path) -> None:
    for path in (folder, modular):
        assert {"duration_head", "diffusion_decoder"} <= read_index(path).keys()
        checkpoint = Checkpoint(path)
        loaded = (*checkpoint.text_encoder().modules, *checkpoint.decoder().modules)
        kinds = {type(part).__name__ for part in loaded}
        assert not kinds & LEFT_OUT
        assert "AutoencoderKLLTX2Video" in kinds
        assert sorted(unused_weights(path)) == ["diffusion_decoder/*.safetensors", "duration_head/*.safetensors"]
    meta = Checkpoint(folder, "meta").footprint(request_of(folder))
    assert not {*meta.encoder, *meta.decoder} & {"duration_head", "diffusion_decoder"}


def test_weights_of_these_parts_may_be_missing(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copied")
    for part in ("duration_head", "diffusion_decoder"):
        for file in (copied / part).glob("*.safetensors"):
            file.unlink()
    assert [*weight_problems(Checkpoint(copied))] == []
    request = request_of(copied)
    assert load_pipeline(Checkpoint(copied)).run(request).shape == (5, *SIDES, 3)


def test_a_folder_with_the_diffusion_decoder_alone_is_refused(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copied")
    file = copied / "model_index.json"
    file.write_text(json.dumps({name: entry for name, entry in read_index(copied).items() if name != "vae"}))
    with pytest.raises(ValueError, match="has no vae, and its diffusion_decoder is not served"):
        _ = Checkpoint(copied).defaults
