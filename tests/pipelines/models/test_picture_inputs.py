"""Each model with input pictures, on gangs of Gloo ranks, equals the pipeline's own call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.core.packing import joined, pack, unpack
from engines.core.tensors import relative_difference
from engines.parallel import strategies as strategies
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.request import InputPicture, InputPictures
from pipelines.run import load_pipeline
from tests.deployments.support.files import noise
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import NEGATIVE
from tests.pipelines.support.checkpoints import tiny_others, tiny_pictures, tiny_qwen
from tests.pipelines.support.references.picture_cases import (
    PictureCase,
    own,
    pictures_of,
    ran,
    request_of,
    small_pictures,
)

pytestmark = pytest.mark.slow


TOLERANCE = 1e-4
"""Relative, in float32: sums are added in another order."""
TWO = ((64, 72), (70, 85))
FOUR = (*TWO, (80, 64), (96, 70))
CONTROL = {"control_scale": 0.6, "control_guidance_end": 0.7}

CASES = {
    "flux": PictureCase(make=tiny_pictures.flux, tensor=True, num_steps=4, changes={"strength": 0.7}),
    "flux, the strength of its own": PictureCase(make=tiny_pictures.flux, num_steps=4),
    "flux kontext": PictureCase(make=tiny_pictures.flux_kontext, tensor=True),
    "flux2 dev": PictureCase(make=tiny_pictures.flux2_dev, tensor=True, pictures=()),
    "flux2 dev, one picture": PictureCase(make=tiny_pictures.flux2_dev, tensor=True, pictures=TWO[1:]),
    "flux2 dev, two pictures": PictureCase(make=tiny_pictures.flux2_dev, pictures=TWO),
    "flux2 dev, three pictures": PictureCase(make=tiny_pictures.flux2_dev, pictures=FOUR[:3]),
    "flux2 dev, four pictures": PictureCase(make=tiny_pictures.flux2_dev, pictures=FOUR),
    "flux2 klein, one picture": PictureCase(make=tiny_pictures.flux2_klein, pictures=TWO[1:]),
    "flux2 klein, two pictures": PictureCase(make=tiny_pictures.flux2_klein, pictures=TWO),
    "flux2 klein, four pictures": PictureCase(make=tiny_pictures.flux2_klein, tensor=True, pictures=FOUR),
    "flux2 klein base": PictureCase(make=tiny_pictures.flux2_klein_base, tensor=True, guidance=True, pictures=()),
    "flux2 klein base, two pictures": PictureCase(
        make=tiny_pictures.flux2_klein_base, tensor=True, guidance=True, pictures=TWO
    ),
    "qwen": PictureCase(make=tiny_qwen.qwen, tensor=True, num_steps=4, changes={"strength": 0.7, **NEGATIVE}),
    "qwen, the strength of its own": PictureCase(make=tiny_qwen.qwen, num_steps=4, changes=NEGATIVE),
    "qwen, a mask": PictureCase(
        make=tiny_qwen.qwen,
        has_mask=True,
        num_steps=4,
        changes={"strength": 0.7, **NEGATIVE},
        own={"output_type": "pil"},
    ),
    "qwen, a picture and a control": PictureCase(
        make=tiny_qwen.qwen_controlled,
        tensor=True,
        guidance=True,
        has_control=True,
        num_steps=4,
        changes={**NEGATIVE, "strength": 0.7, **CONTROL},
    ),
    "qwen, a mask and a control": PictureCase(
        make=tiny_qwen.qwen_controlled,
        has_mask=True,
        has_control=True,
        num_steps=4,
        changes={**NEGATIVE, "strength": 0.7, **CONTROL},
        own={"output_type": "pil"},
    ),
    "qwen edit": PictureCase(make=tiny_qwen.qwen_edit),
    "qwen edit, a mask": PictureCase(
        make=tiny_qwen.qwen_edit,
        sides=(3, 2),
        pictures=((40, 60),),
        has_mask=True,
        num_steps=4,
        changes={"strength": 0.7},
        own={"output_type": "pil"},
    ),
    "qwen edit plus, one picture": PictureCase(make=tiny_qwen.qwen_edit_plus),
    "qwen edit plus, two pictures": PictureCase(make=tiny_qwen.qwen_edit_plus, tensor=True, pictures=TWO),
    "qwen layered": PictureCase(
        make=tiny_qwen.qwen_layered,
        tensor=True,
        sides=(1, 2),
        pictures=((60, 31),),
        changes={"num_layers": 3, **NEGATIVE},
    ),
    "sd 3": PictureCase(make=tiny_others.sd3, tensor=True, num_steps=4, changes={"strength": 0.7, **NEGATIVE}),
    "sd 3, the strength of its own": PictureCase(make=tiny_others.sd3, num_steps=4, changes=NEGATIVE),
    "z image": PictureCase(make=tiny_pictures.z_image, num_steps=4, changes={"strength": 0.7}),
    "z image, the strength of its own": PictureCase(make=tiny_pictures.z_image, num_steps=4),
}


def denoised(folder: Path, name: str, strategy: str) -> Tensor:
    case, checkpoint = CASES[name], Checkpoint(folder)
    engine = TorchEngine(checkpoint.denoiser(), strategy=strategy)
    with small_pictures():
        latents: Tensor = ran(load_pipeline(checkpoint, engine), checkpoint, case)["latents"]
    return latents


def without_exchange(folder: Path, name: str, strategy: str) -> Tensor:
    """Let each rank attend to its own tokens alone."""
    with patch.object(strategies, "ulysses", lambda kernel, axis, **_: kernel):
        return denoised(folder, name, strategy)


def expected_of(name: str, folder: Path) -> Tensor:
    latents: Tensor = own(name, CASES.__getitem__, folder).get("latents")
    assert latents.std() > 0.1
    return latents


def pixels_of(images: Any) -> Tensor:
    """Return pixels in [0, 1]. Diffusers' blocks for masks give 8-bit pictures alone."""
    if isinstance(images, Tensor):
        return images
    if isinstance(images[0], Tensor):
        return images[0]
    return torch.stack([torch.from_numpy(np.array(image)).movedim(-1, 0) / 255 for image in images])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_latents_equal_the_pipelines_own(name: str, num_ranks: int, folders: Callable[[Any], Path]) -> None:
    case = CASES[name]
    folder = folders(case.make)
    expected = expected_of(name, folder)
    for strategy in case.strategies(num_ranks):
        for latents in gang(num_ranks).run(denoised, folder, name, strategy):
            assert relative_difference(latents, expected) <= TOLERANCE, strategy


@pytest.mark.parametrize("name", CASES)
def test_without_the_exchange_they_do_not(name: str, folders: Callable[[Any], Path]) -> None:
    folder = folders(CASES[name].make)
    for latents in gang(2).run(without_exchange, folder, name, "ulysses"):
        assert relative_difference(latents, expected_of(name, folder)) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["flux2 dev, one picture", "flux2 klein, two pictures"])
def test_blank_pictures_are_as_many_tokens_as_real_ones(name: str, folders: Callable[[Any], Path]) -> None:
    """The pictures have the result's size."""
    case = CASES[name]
    checkpoint = Checkpoint(folders(case.make))
    request = replace(request_of(case, checkpoint.path), width=256, height=256)
    pictures = InputPictures(pictures=(InputPicture.of(noise(256, 256)),) * request.num_pictures)
    with small_pictures():
        conditioning = checkpoint.text_encoder().encode(request, pictures)
    sampler = checkpoint.sampler()
    real = sampler.branches(sampler.begin(request, conditioning))
    for blank, one in zip(checkpoint.first_step(request), real, strict=True):
        names = ("hidden_states", "img_ids")
        shapes = [{name: branch.inputs[name].shape for name in names} for branch in (blank, one)]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", ["flux", "qwen", "sd 3", "z image"])
def test_steps_are_counted_as_the_schedule_does(name: str, folders: Callable[[Any], Path]) -> None:
    case = CASES[name]
    checkpoint = Checkpoint(folders(case.make))
    request = request_of(case, checkpoint.path)
    conditioning, sampler = checkpoint.text_encoder().encode(request, pictures_of(case)), checkpoint.sampler()
    for num, strength in itertools.product((1, 7, 10, 50), (None, 0.01, 0.3, 0.58, 0.7, 1.0)):
        changed = replace(request, num_inference_steps=num, strength=strength)
        assert checkpoint.num_steps(changed) == sampler.num_steps(sampler.begin(changed, conditioning)), changed


def test_an_editor_paints_inside_a_mask_in_the_size_asked_for(folders: Callable[[Any], Path]) -> None:
    """The size may differ from the megapixel in which it sees pictures. Words alone edit in all steps."""
    case = replace(CASES["qwen edit, a mask"], sides=(4, 5))
    checkpoint = Checkpoint(folders(case.make))
    request = request_of(case, checkpoint.path)
    with small_pictures():
        frames = load_pipeline(checkpoint).run(request, pictures_of(case))
    assert frames.shape == (1, request.height, request.width, 3)
    assert checkpoint.num_steps(request) == 3
    assert checkpoint.num_steps(replace(request, has_mask=False)) == 4
    with pytest.raises(ValueError, match="takes strength with a picture and a mask"):
        checkpoint.defaults.check(replace(request, has_mask=False))


def fast_denoised(folder: Path, name: str) -> Tensor:
    """Run FLUX's hand-ordered step, whose image tokens include the picture's."""
    case, checkpoint = CASES[name], Checkpoint(folder)
    engine = TorchEngine(checkpoint.denoiser(), fast=True, strategy="ulysses")
    with small_pictures():
        latents: Tensor = ran(load_pipeline(checkpoint, engine), checkpoint, case)["latents"]
    return latents


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["flux", "flux kontext"])
def test_the_fast_path_takes_pictures(name: str, num_ranks: int, folders: Callable[[Any], Path]) -> None:
    folder = folders(CASES[name].make)
    for latents in gang(num_ranks).run(fast_denoised, folder, name):
        assert relative_difference(latents, expected_of(name, folder)) <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_pictures_come_out_and_jobs_move(name: str, folders: Callable[[Any], Path]) -> None:
    """In one process, previews and the finished picture have the requested size; a packed state continues alike."""
    case = CASES[name]
    folder = folders(case.make)
    checkpoint, request = Checkpoint(folder), request_of(case, folder)
    with small_pictures():
        pipeline = load_pipeline(checkpoint)
        states = list(pipeline.states(request, pictures_of(case)))
    sampler, decoder = pipeline.sampler, pipeline.decoder
    sides = (request.height, request.width)
    preview = decoder.preview(sampler.preview(states[1]), request)
    assert (preview.shape, preview.dtype) == ((1, *sides, 3), np.dtype(np.uint8))
    assert torch.equal(sampler.preview(states[-1])["latents"], sampler.latents(states[-1])["latents"])
    frames = decoder.decode(sampler.latents(states[-1]), request)
    shape = (request.num_layers, *sides, 4) if request.num_layers else (1, *sides, 3)
    assert (frames.shape, frames.dtype) == (shape, np.dtype(np.uint8))
    cpu = torch.device("cpu")
    skeleton, tensors = pack(states[1], cpu)
    state = unpack(skeleton, joined(tensors, cpu))
    for _ in range(1, sampler.num_steps(state)):
        state = sampler.advance(state, pipeline.engine.predict(sampler.branches(state), (0,)))
    assert torch.equal(sampler.latents(state)["latents"], sampler.latents(states[-1])["latents"])
    expected = own(name, CASES.__getitem__, folder).get("images")
    pixels = decoder.pixels(sampler.latents(states[-1]))
    rounding = 0 if isinstance(expected, Tensor) or isinstance(expected[0], Tensor) else 0.5 / 255
    torch.testing.assert_close(pixels, pixels_of(expected), rtol=0, atol=1e-3 + rounding)
