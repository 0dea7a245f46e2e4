"""LTX-2 with pictures at given frames, on gangs of Gloo ranks, equals diffusers' pipelines as users call them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2ConditionPipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image
from torch import Tensor

from engines.core.tensors import relative_difference
from engines.parallel.mesh import team_of_one
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.run import load_pipeline
from pipelines.size import Size
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import TOLERANCE
from tests.pipelines.support.checkpoints import tiny_ltx
from tests.pipelines.support.full_size import Recorded, first_step, model_on_gpu
from tests.pipelines.support.references import own_clips
from tests.pipelines.support.references.video import denoised_from, encoded, picture, pictures_of

Images = tuple[Image.Image, ...]
SIDES = (64, 96)
"""Sides of three frames of latents: 18 tokens, and 6 for each picture after the first frame."""
INDICES = {"first and last": (), "one in the middle": (1,), "three": (4, 0, 2)}
PLACES: dict[str, tuple[int, ...]] = {"first and last": (0, 2), "one in the middle": (1,), "three": (2, 0, 1)}
"""The same in frames of latents; this auto-encoder makes two frames of each after the first."""
STRATEGIES = {1: ("ulysses",), 2: ("ulysses", "ring", "tensor", "pipeline")}


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_ltx.ltx2_few_layers)


def request_of(name: str, folder: Path, **changes: Any) -> MediaRequest:
    height, width = SIDES
    places = {"num_pictures": len(PLACES[name]), "frame_indices": INDICES[name]}
    words = {"prompt": "a red circle", "negative_prompt": "blue", "true_cfg_scale": 1.0}
    more = {"num_inference_steps": 2, "seed": 5, **words, **places, **changes}
    return Checkpoint(folder).defaults.request(Size(width=width, height=height, num_frames=5), **more)


def images_of(name: str) -> Images:
    height, width = SIDES
    return tuple(picture(width, height, seed) for seed in range(len(PLACES[name])))


def conditions_of(name: str) -> list[LTX2VideoCondition]:
    pairs = zip(images_of(name), PLACES[name], strict=True)
    return [LTX2VideoCondition(frames=image, index=place) for image, place in pairs]


SIZES = [
    pytest.param(name, num_ranks, marks=[] if num_ranks == 1 or name == "three" else [pytest.mark.slow])
    for name in PLACES
    for num_ranks in STRATEGIES
]


@pytest.mark.parametrize(("name", "num_ranks"), SIZES)
def test_latents_equal_those_of_the_classic_pipeline(name: str, num_ranks: int, folder: Path) -> None:
    request = request_of(name, folder)
    expected = own_clips.ltx2_tokens(LTX2ConditionPipeline, folder, request, conditions=conditions_of(name))
    assert expected.std() > 0.1
    for strategy in STRATEGIES[num_ranks]:
        for values in gang(num_ranks).run(
            denoised_from, folder, request, encoded(folder, request, pictures_of(images_of(name))), strategy
        ):
            tokens = values["latents"][:, : values["base_token_count"]]
            assert relative_difference(tokens, expected) <= TOLERANCE, strategy


def test_each_picture_and_its_place_matter(folder: Path) -> None:
    pipeline = load_pipeline(Checkpoint(folder))
    pictures = pictures_of(images_of("first and last"))

    def tokens(*indices: int) -> Tensor:
        request = request_of("first and last", folder, frame_indices=indices)
        values = pipeline.denoise(request, pictures)
        made: Tensor = values["latents"][:, : values["base_token_count"]]
        return made

    ends = tokens(0, -1)
    assert torch.equal(ends, tokens(0, 3)), "frames 3 and 4 share a frame of latents"
    for others in ((0, 1), (-1, 0)):
        assert relative_difference(tokens(*others), ends) > 10 * TOLERANCE


def test_a_guided_clip_is_that_of_the_blocks_and_previews_have_its_size(folder: Path) -> None:
    request = request_of("three", folder, true_cfg_scale=3.0)
    pipeline = load_pipeline(Checkpoint(folder))
    own = own_clips.sounding_blocks(folder, request, (), conditions=conditions_of("three"))
    states = list(pipeline.states(request, pictures_of(images_of("three"))))
    latents = pipeline.sampler.latents(states[-1])
    assert torch.equal(latents["latents"][:, : latents["base_token_count"]], own["latents"])
    assert torch.equal(latents["audio_latents"], own["audio_latents"])
    frames = pipeline.decoder.decode(latents, request)
    assert (frames.shape, frames.dtype) == ((5, *SIDES, 3), np.dtype(np.uint8))
    preview = pipeline.decoder.preview(pipeline.sampler.preview(states[1]), request)
    assert preview.shape == (1, *SIDES, 3)


def test_one_picture_at_the_beginning_is_begun_with_as_before(folder: Path) -> None:
    """The blocks for a first picture make the same bytes as before."""
    pipeline = load_pipeline(Checkpoint(folder))
    pictures = pictures_of(images_of("one in the middle"))
    values = [
        pipeline.denoise(request_of("one in the middle", folder, frame_indices=indices), pictures)
        for indices in ((), (0,), (-5,))
    ]
    assert all(torch.equal(one["latents"], values[0]["latents"]) for one in values)
    assert "base_token_count" not in values[0]


def test_blank_pictures_have_the_shapes_of_real_ones(folder: Path) -> None:
    checkpoint, request = Checkpoint(folder), request_of("three", folder)
    sampler, encoder = checkpoint.sampler(), checkpoint.text_encoder()
    real = sampler.branches(sampler.begin(request, encoder.encode(request, pictures_of(images_of("three")))))
    for blank, one in zip(checkpoint.first_step(request), real, strict=True):
        assert blank.constants == one.constants
        shapes = [{name: x.shape for name, x in branch.inputs.items()} for branch in (blank, one)]
        assert shapes[0]["hidden_states"] == shapes[1]["hidden_states"] == (1, 18 + 2 * 6, 4)
        assert shapes[0].keys() == shapes[1].keys()


@torch.no_grad()
def test_a_step_at_full_size_is_what_a_gpu_can_record() -> None:
    """It mixes no host and device tensors; the last picture is appended, with its own timestep."""
    branch = first_step("LTX-2", num_pictures=2)[0]
    assert branch.inputs["timestep"].numel() == 16 * 16 * 24 + 16 * 24
    recorded = Recorded(model_on_gpu("LTX-2"), branch, team_of_one()).run()
    assert (recorded.found, recorded.is_recorded) == ([], True)


@pytest.mark.parametrize(
    ("number", "indices", "told"),
    [
        (3, (), "3 input pictures were sent: say in frame_indices"),
        (2, (0,), "frame_indices has 1 numbers for 2 input pictures"),
        (1, (5,), "frame_indices has 5; it must be from 0 to 4, or from -5 to -1"),
        (1, (-6,), "frame_indices has -6"),
        (2, (1, 2), "two pictures belong to one place of the clip"),
        (9, tuple(range(5)), "9 input pictures were sent; this model takes from 0 to 8"),
    ],
)
def test_places_that_cannot_be_are_refused(number: int, indices: tuple[int, ...], told: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=told):
        request_of("three", folder, num_pictures=number, frame_indices=indices)
    with pytest.raises(ValueError, match="takes no frame_indices"):
        Checkpoint.open("wan-shapes", weights=False).defaults.request(frame_indices=(0,))
