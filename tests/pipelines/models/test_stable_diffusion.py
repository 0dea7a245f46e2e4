"""Stable Diffusion 3 and XL with pictures and masks equal diffusers' classic pipelines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import ImageOps
from torch import Tensor

from engines.core.packing import joined, pack, unpack
from engines.core.tensors import relative_difference
from engines.parallel.division import shape_of
from pipelines.checkpoint import Checkpoint
from pipelines.loading import ModelSource
from pipelines.request import InputPicture, MediaRequest
from pipelines.run import Pipeline, load_pipeline
from tests.pipelines.support.checkpoints import tiny_others, tiny_unknown, tiny_whole
from tests.pipelines.support.references.picture_cases import (
    CONTROL_SIZE,
    PictureCase,
    drawn,
    images_of,
    mask_of,
    pictures_of,
    request_of,
)

TOLERANCE = 1e-4
PIXELS = (40, 24)
"""Width and height of pictures: the request's size for a model with tokens of 8x8 pixels."""


@dataclass(frozen=True, kw_only=True)
class Case(PictureCase):
    """``classic`` is diffusers' equivalent class."""

    classic: str


COMMON: dict[str, Any] = {"num_steps": 4, "changes": {"negative_prompt": "blue", "strength": 0.7}}
XL: dict[str, Any] = {"pictures": ((80, 48),), **COMMON}
MASK: dict[str, Any] = {"classic": "StableDiffusionXLInpaintPipeline", "has_mask": True, **XL}
CASES = {
    "sd 3": Case(make=tiny_others.sd3, classic="StableDiffusion3Img2ImgPipeline", pictures=(PIXELS,), **COMMON),
    "sdxl": Case(make=tiny_unknown.sdxl, classic="StableDiffusionXLImg2ImgPipeline", **XL),
    "sdxl, a mask": Case(make=tiny_unknown.sdxl, **MASK),
    "sdxl made for masks": Case(make=partial(tiny_unknown.sdxl, in_channels=9), **MASK),
}

WORDS = {"sd 3": "StableDiffusion3Pipeline", "sdxl": "StableDiffusionXLPipeline"}
"""The classes that paint from words alone."""


def with_own_strength(case: Case) -> Case:
    return replace(case, changes={"negative_prompt": "blue"})


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], tuple[Checkpoint, Pipeline]]:
    @cache
    def load(make: Any) -> tuple[Checkpoint, Pipeline]:
        checkpoint = Checkpoint(make(tmp_path_factory.mktemp("model")))
        return checkpoint, load_pipeline(checkpoint)

    return load


@pytest.fixture
def certain() -> Iterator[None]:
    """Let auto-encoders draw nothing: classic pipelines draw noise before they encode, and blocks after it."""
    with patch.object(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode()):
        yield


def classic(case: Case, checkpoint: Checkpoint, output_type: str) -> Any:
    """Return the classic pipeline's result for the case."""
    import diffusers

    request = request_of(case, checkpoint.path)
    pipeline = getattr(diffusers, case.classic).from_pretrained(checkpoint.path)
    pipeline.set_progress_bar_config(disable=True)
    more: dict[str, Any] = {"mask_image": mask_of(*case.pictures[0])} if case.has_mask else {}
    if case.pictures:
        more |= {"image": images_of(case)[0], "strength": checkpoint.defaults.strength_of(request)}
    return pipeline(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        height=request.height,
        width=request.width,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.true_cfg_scale,
        generator=torch.Generator().manual_seed(request.seed),
        output_type=output_type,
        **more,
    ).images


@pytest.mark.usefixtures("certain")
@pytest.mark.parametrize("change", [lambda case: case, with_own_strength], ids=["0.7", "strength of its own"])
@pytest.mark.parametrize("name", CASES)
def test_latents_and_pixels_equal_the_classic_pipelines(
    name: str, change: Callable[[Case], Case], loaded: Callable[[Any], tuple[Checkpoint, Pipeline]]
) -> None:
    case = change(CASES[name])
    checkpoint, pipeline = loaded(case.make)
    request = request_of(case, checkpoint.path)
    *states, last = pipeline.states(request, pictures_of(case))
    assert len(states) == checkpoint.num_steps(request) < request.num_inference_steps
    latents = pipeline.sampler.latents(last)
    assert relative_difference(latents["latents"], classic(case, checkpoint, "latent")) <= TOLERANCE
    pixels_FHWC = pipeline.decoder.pixels(latents).movedim(1, -1).numpy()
    np.testing.assert_allclose(pixels_FHWC, classic(case, checkpoint, "np"), rtol=0, atol=1e-3)


@pytest.mark.parametrize("negative", [None, "", "blue"])
@pytest.mark.parametrize("name", ["sd 3", "sdxl"])
def test_a_negative_prompt_is_what_the_request_said(
    name: str, negative: str | None, loaded: Callable[[Any], tuple[Checkpoint, Pipeline]]
) -> None:
    """Without one SDXL uses zeros, which differ from the empty prompt."""
    case = replace(CASES[name], classic=WORDS[name], pictures=(), changes={"negative_prompt": negative})
    checkpoint, pipeline = loaded(case.make)
    request = request_of(case, checkpoint.path)
    assert request.true_cfg_scale > 1
    assert relative_difference(pipeline.denoise(request)["latents"], classic(case, checkpoint, "latent")) <= TOLERANCE


def test_what_a_u_net_takes_is_what_its_channels_say(
    loaded: Callable[[Any], tuple[Checkpoint, Pipeline]], tmp_path: Path
) -> None:
    checkpoint, _ = loaded(CASES["sdxl made for masks"].make)
    defaults = checkpoint.defaults
    assert (defaults.min_pictures, defaults.takes_mask, defaults.needs_mask) == (1, True, True)
    defaults.check(defaults.request(num_pictures=1, has_mask=True))
    with pytest.raises(ValueError, match="0 input pictures were sent"):
        defaults.request(num_pictures=0, has_mask=False)
    with pytest.raises(ValueError, match="needs a mask: send one"):
        defaults.request(num_pictures=1, has_mask=False)
    usual = loaded(CASES["sdxl"].make)[0].defaults
    assert (usual.min_pictures, usual.needs_mask) == (0, False)
    with pytest.raises(ValueError, match=r"unet of .* takes 8 channels, and a StableDiffusionXLPipeline gives it 4"):
        _ = Checkpoint(tiny_unknown.sdxl(tmp_path, in_channels=8)).defaults


@pytest.mark.parametrize("name", CASES)
def test_what_comes_along_matters(name: str, loaded: Callable[[Any], tuple[Checkpoint, Pipeline]]) -> None:
    case = CASES[name]
    checkpoint, pipeline = loaded(case.make)
    request, given = request_of(case, checkpoint.path), pictures_of(case)
    mirrored = [InputPicture.of(ImageOps.mirror(one.image())) for one in (*given.pictures, given.mask) if one]
    others = [replace(given, pictures=tuple(mirrored[:1])), *(replace(given, mask=mask) for mask in mirrored[1:])]
    painted = pipeline.denoise(request, given)["latents"]
    for other in others:
        assert relative_difference(pipeline.denoise(request, other)["latents"], painted) > 0.01


@pytest.mark.parametrize("name", ["sd 3", "sdxl"])
def test_steps_are_counted_as_the_schedule_does(
    name: str, loaded: Callable[[Any], tuple[Checkpoint, Pipeline]]
) -> None:
    checkpoint, pipeline = loaded(CASES[name].make)
    request = request_of(CASES[name], checkpoint.path)
    conditioning = pipeline.text_encoder.encode(request, pictures_of(CASES[name]))
    for num, strength in itertools.product((1, 7, 10, 50), (None, 0.01, 0.3, 0.58, 0.7, 1.0)):
        changed = replace(request, num_inference_steps=num, strength=strength)
        try:
            checkpoint.defaults.check(changed)
        except ValueError:
            assert name == "sdxl"
            assert checkpoint.num_steps(changed) == 0
            continue
        state = pipeline.sampler.begin(changed, conditioning)
        assert checkpoint.num_steps(changed) == pipeline.sampler.num_steps(state), changed


def test_a_strength_that_leaves_no_step_is_told(loaded: Callable[[Any], tuple[Checkpoint, Pipeline]]) -> None:
    checkpoint, _ = loaded(CASES["sdxl"].make)
    with pytest.raises(ValueError, match=r"strength is 0\.2, which leaves none of 4 steps; it must be at least 1/4"):
        checkpoint.defaults.request(num_pictures=1, num_inference_steps=4, strength=0.2)


@pytest.mark.parametrize("name", ["sdxl", "sdxl, a mask"])
def test_a_job_moves_between_ranks(name: str, loaded: Callable[[Any], tuple[Checkpoint, Pipeline]]) -> None:
    """Steps and previews of a packed state are those of the state itself, except rounding: a transfer changes the
    memory order for convolutions."""
    checkpoint, pipeline = loaded(CASES[name].make)
    request = request_of(CASES[name], checkpoint.path)
    _, middle, *_, last = pipeline.states(request, pictures_of(CASES[name]))
    cpu = torch.device("cpu")
    skeleton, tensors = pack(middle, cpu)
    state = unpack(skeleton, joined(tensors, cpu))
    preview = pipeline.decoder.preview(pipeline.sampler.preview(state), request)
    assert (preview.shape, preview.dtype) == ((1, request.height, request.width, 3), np.dtype(np.uint8))
    while state.step < pipeline.sampler.num_steps(state):
        state = pipeline.sampler.advance(state, pipeline.engine.predict(pipeline.sampler.branches(state), (0,)))
    finished, expected = (pipeline.sampler.latents(one)["latents"] for one in (state, last))
    assert relative_difference(finished, expected) <= 1e-5


SETTINGS = {"control_scale": 0.6, "control_guidance_start": 0.2, "control_guidance_end": 0.8}


@pytest.fixture
def controlled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return a folder that the classic pipeline saved, and its network alone."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    folder = tiny_whole.sdxl_controlled(tmp_path / "model")
    return folder, folder / "controlnet"


def classic_control(folder: Path, request: MediaRequest) -> Tensor:
    """Return latents of the classic pipeline with the control picture of the case."""
    import diffusers

    own = diffusers.StableDiffusionXLControlNetPipeline.from_pretrained(folder)
    own.set_progress_bar_config(disable=True)
    latents: Tensor = own(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        image=drawn(*CONTROL_SIZE, seed=7),
        height=request.height,
        width=request.width,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.true_cfg_scale,
        controlnet_conditioning_scale=request.control_scale,
        control_guidance_start=request.control_guidance_start,
        control_guidance_end=request.control_guidance_end,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="latent",
    ).images
    return latents


def test_a_control_network_beside_sdxl_gives_the_latents_of_the_classic_pipeline(
    controlled: tuple[Path, Path],
) -> None:
    """It runs by blocks. A step has one shape for all weights, so that one captured step serves them."""
    folder, network = controlled
    checkpoint = Checkpoint.open(str(ModelSource(base=str(folder / "sdxl"), network=str(network))))
    assert not checkpoint.spec.is_whole
    assert checkpoint.defaults.capabilities == ("text-to-image", "image-to-image", "control")
    case = PictureCase(
        make=tiny_whole.sdxl_controlled,
        pictures=(),
        has_control=True,
        num_steps=4,
        changes={"negative_prompt": "blue", **SETTINGS},
    )
    request, pipeline = request_of(case, checkpoint.path), load_pipeline(checkpoint)
    states = list(pipeline.states(request, pictures_of(case)))
    branches = [pipeline.sampler.branches(state)[0] for state in states[:-1]]
    assert [float(branch.inputs["control.scale"]) for branch in branches] == pytest.approx([0, 0.6, 0.6, 0])
    assert len(set(map(shape_of, branches))) == 1
    expected = classic_control(folder, request)
    latents = pipeline.sampler.latents(states[-1])["latents"]
    assert relative_difference(latents, expected) <= TOLERANCE
    unset: dict[str, Any] = dict.fromkeys(SETTINGS)
    plain = replace(request, has_control=False, **unset)
    assert torch.equal(
        pipeline.denoise(plain)["latents"], load_pipeline(Checkpoint(folder / "sdxl")).denoise(plain)["latents"]
    )


def test_with_a_picture_and_a_mask_a_control_matters(controlled: tuple[Path, Path]) -> None:
    folder, network = controlled
    checkpoint = Checkpoint.open(str(ModelSource(base=str(folder / "sdxl"), network=str(network))))
    pipeline = load_pipeline(checkpoint)
    for has_mask in (False, True):
        case = PictureCase(
            make=tiny_whole.sdxl_controlled,
            pictures=((80, 48),),
            has_mask=has_mask,
            has_control=True,
            num_steps=4,
            changes={"strength": 0.7},
        )
        request = request_of(case, checkpoint.path)
        made, without = (
            pipeline.denoise(replace(request, control_scale=scale), pictures_of(case))["latents"]
            for scale in (1.0, 0.0)
        )
        plain = replace(case, has_control=False)
        other = pipeline.denoise(replace(request, has_control=False), pictures_of(plain))["latents"]
        assert relative_difference(without, other) <= TOLERANCE
        assert relative_difference(made, other) > 10 * TOLERANCE


def test_a_folder_of_the_classic_pipeline_with_a_network_runs_as_before(controlled: tuple[Path, Path]) -> None:
    assert Checkpoint(controlled[0]).spec.is_whole
