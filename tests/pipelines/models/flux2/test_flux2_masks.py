"""FLUX.2 klein with a mask equals diffusers' ``Flux2KleinInpaintPipeline``, which has no blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL.Image import Image
from torch import Tensor

from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.run import load_pipeline
from tests.engines.support.gloo import gang
from tests.pipelines.support.checkpoints import tiny_pictures
from tests.pipelines.support.pretended_jobs import hoisted_again
from tests.pipelines.support.references.picture_cases import (
    PictureCase,
    images_of,
    mask_of,
    pictures_of,
    ran,
    request_of,
)

TOLERANCE = 1e-4
"""Relative, in float32: sums are added in another order."""
SIZE = (80, 64)
"""Size of the input picture and of the result, which diffusers' pipeline requires to be equal."""
MASKED = PictureCase(make=tiny_pictures.flux2_klein, sides=(4, 5), pictures=(SIZE,), has_mask=True, num_steps=4)
CASES = {
    "distilled": replace(MASKED, changes={"strength": 0.7}),
    "with the strength of its own": MASKED,
    "with a picture to look at": replace(MASKED, pictures=(SIZE, (70, 85))),
    "base": replace(MASKED, make=tiny_pictures.flux2_klein_base, num_steps=3),
}


def expected_of(case: PictureCase, folder: Path, mask: Image) -> Tensor:
    """Return the pixels of diffusers' own pipeline, in [0, 1]."""
    from diffusers import Flux2KleinInpaintPipeline, Flux2KleinPipeline

    request, (image, *others) = request_of(case, folder), images_of(case)
    parts = Flux2KleinPipeline.from_pretrained(folder).components
    pipeline = Flux2KleinInpaintPipeline(**parts, is_distilled=case.make is tiny_pictures.flux2_klein)
    pipeline.set_progress_bar_config(disable=True)
    said = {} if request.strength is None else {"strength": request.strength}
    images: Tensor = pipeline(
        prompt=request.prompt,
        image=image,
        mask_image=mask,
        image_reference=others[0] if others else None,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.true_cfg_scale,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="pt",
        **said,
    ).images
    return images


def painted(folder: Path, case: PictureCase, strategy: str = "ulysses") -> Tensor:
    checkpoint = Checkpoint(folder)
    pipeline = load_pipeline(checkpoint, TorchEngine(checkpoint.denoiser(), strategy=strategy))
    return pipeline.decoder.pixels(ran(pipeline, checkpoint, case))


@pytest.mark.parametrize("name", CASES)
def test_it_paints_what_diffusers_own_pipeline_does(name: str, folders: Callable[[Any], Path]) -> None:
    case, folder = CASES[name], folders(CASES[name].make)
    (pixels,) = gang(1).run(painted, folder, case)
    assert relative_difference(pixels, expected_of(case, folder, mask_of(*SIZE))) <= TOLERANCE
    everything = expected_of(case, folder, mask_of(2 * SIZE[0], SIZE[1]).crop((0, 0, *SIZE)))
    assert relative_difference(pixels, everything) > 10 * TOLERANCE, "the mask matters"


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "strategy"),
    [*(("distilled", each) for each in ("ulysses", "ring", "allgather_kv", "tensor")), ("base", "guidance")],
)
def test_a_gang_paints_the_same(name: str, strategy: str, num_ranks: int, folders: Callable[[Any], Path]) -> None:
    case = CASES[name]
    folder = folders(case.make)
    for pixels in gang(num_ranks).run(painted, folder, case, strategy):
        assert relative_difference(pixels, expected_of(case, folder, mask_of(*SIZE))) <= TOLERANCE


def test_steps_are_counted_as_the_schedule_does(folders: Callable[[Any], Path]) -> None:
    folder = folders(tiny_pictures.flux2_klein)
    checkpoint, case = Checkpoint(folder), CASES["distilled"]
    conditioning, sampler = checkpoint.text_encoder().encode(request_of(case, folder), pictures_of(case)), None
    for num_steps, strength in ((1, 1.0), (7, 0.3), (10, 0.58), (10, None), (50, 0.01)):
        request = replace(request_of(case, folder), num_inference_steps=num_steps, strength=strength)
        sampler = sampler or checkpoint.sampler()
        assert checkpoint.num_steps(request) == sampler.num_steps(sampler.begin(request, conditioning)), request


def test_strength_needs_a_mask(folders: Callable[[Any], Path]) -> None:
    defaults = Checkpoint(folders(tiny_pictures.flux2_klein)).defaults

    def asked(**changes: Any) -> MediaRequest:
        return defaults.request(num_pictures=1, **changes)

    assert asked(strength=0.5, has_mask=True).strength == 0.5
    with pytest.raises(ValueError, match="takes strength with a picture and a mask"):
        asked(strength=0.5)


@pytest.mark.parametrize("make", [tiny_pictures.flux2_dev, tiny_pictures.flux2_klein, tiny_pictures.flux2_klein_base])
def test_hand_ordered_steps_share_what_a_job_computes_once(make: Any, folders: Callable[[Any], Path]) -> None:
    case, folder = PictureCase(make=make, pictures=((64, 72),)), folders(make)
    checkpoint, request = Checkpoint(folder), request_of(case, folder)
    assert request.num_inference_steps > 1
    engine = TorchEngine(checkpoint.denoiser(), fast=True)
    with closing(engine), hoisted_again() as again:
        load_pipeline(checkpoint, engine).denoise(request, pictures_of(case))
    assert again == []
