"""A folder with this setting gets pictures in the size of the request, whatever size they had."""

import json
from pathlib import Path

import pytest
import torch

from pipelines.checkpoint import Checkpoint
from pipelines.run import load_pipeline
from tests.pipelines.support.checkpoints import tiny_pictures
from tests.pipelines.support.references.picture_cases import PictureCase, pictures_of, request_of, small_pictures

CASE = PictureCase(make=tiny_pictures.flux_kontext, pictures=((50, 31),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pictures.flux_kontext(tmp_path_factory.mktemp("kontext"))


@pytest.mark.parametrize("fits", [True, False])
def test_the_latents_are_those_of_the_cut_picture(folder: Path, fits: bool) -> None:
    (folder / "troupe.json").write_text(json.dumps({"fits_pictures": fits, "min_pictures": 1}))
    checkpoint, request = Checkpoint(folder), request_of(CASE, folder)
    encoder, pictures = checkpoint.text_encoder(), pictures_of(CASE)
    with small_pictures():
        latents = encoder.encode(request, pictures).values["image_latents"]
        cut = encoder.encode(request, pictures.cut_to(request.width, request.height)).values["image_latents"]
    assert (latents.shape == (1, 4, request.height // 8, request.width // 8)) == fits
    assert (latents.shape == cut.shape and torch.equal(latents, cut)) == fits


def test_the_step_that_prepares_is_the_step_that_comes(folder: Path) -> None:
    (folder / "troupe.json").write_text(json.dumps({"fits_pictures": True, "min_pictures": 1, "max_tokens": 8}))
    checkpoint, request = Checkpoint(folder), request_of(CASE, folder)
    (prepared,) = checkpoint.first_step(request)
    pipeline = load_pipeline(checkpoint)
    sampler = pipeline.sampler
    (real,) = sampler.branches(sampler.begin(request, pipeline.text_encoder.encode(request, pictures_of(CASE))))
    shapes = [{name: x.shape for name, x in step.arguments.items() if hasattr(x, "shape")} for step in (prepared, real)]
    assert shapes[0] == shapes[1]
