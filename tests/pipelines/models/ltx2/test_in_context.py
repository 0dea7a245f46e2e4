"""LTX-2 with a clip as context, on gangs of Gloo ranks, equals diffusers' pipeline as users call it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import LTX2InContextPipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from PIL import Image
from torch import Tensor

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.request import InputPicture, InputPictures, InputVideo, MediaRequest
from pipelines.run import load_pipeline
from pipelines.size import Size
from tests.engines.support.gloo import gang
from tests.pipelines.models.test_gangs import TOLERANCE
from tests.pipelines.support.checkpoints import tiny_ltx
from tests.pipelines.support.references import own_clips
from tests.pipelines.support.references.video import denoised_from, encoded, frames, picture

SIDES = (64, 96)
NUM_FRAMES = 5
"""Three frames of latents: 18 tokens, and as many of the context."""
CASES: dict[str, tuple[int, ...]] = {"a clip": (), "a picture begins": (0,), "pictures too": (4, 0)}
"""Places of pictures beside the clip, counted in frames."""
PLACES = {0: 0, 4: 2}
"""The same in frames of latents."""
STRATEGIES = {1: ("ulysses",), 2: ("ulysses", "tensor"), 4: ("ring", "hybrid")}


@pytest.fixture(scope="module")
def folder(folders: Callable[[Any], Path]) -> Path:
    return folders(tiny_ltx.ltx2_few_layers)


def request_of(name: str, folder: Path, **changes: Any) -> MediaRequest:
    height, width = SIDES
    along = {"num_pictures": len(CASES[name]), "frame_indices": CASES[name], "num_video_frames": NUM_FRAMES}
    words = {"prompt": "a red circle", "negative_prompt": "blue", "true_cfg_scale": 1.0}
    more = {"num_inference_steps": 2, "seed": 5, **words, **along, **changes}
    return Checkpoint(folder).defaults.request(Size(width=width, height=height, num_frames=NUM_FRAMES), **more)


def images_of(name: str) -> list[Image.Image]:
    height, width = SIDES
    return [picture(width, height, seed) for seed in range(5, 5 + len(CASES[name]))]


def along_with(name: str) -> InputPictures:
    height, width = SIDES
    data = b"".join(frame.tobytes() for frame in frames(width, height, NUM_FRAMES))
    clip = InputVideo(width=width, height=height, num_frames=NUM_FRAMES, fps=24, data=data)
    return InputPictures(pictures=tuple(map(InputPicture.of, images_of(name))), video=clip)


def own_latents(name: str, folder: Path, request: MediaRequest) -> Tensor:
    """Return the tokens of the classic pipeline without guidance."""
    height, width = SIDES
    pairs = zip(images_of(name), CASES[name], strict=True)
    conditions = [LTX2VideoCondition(frames=image, index=PLACES[frame]) for image, frame in pairs]
    reference = LTX2ReferenceCondition(frames=list(frames(width, height, NUM_FRAMES)))
    more = {"reference_conditions": [reference], "conditions": conditions or None}
    return own_clips.ltx2_tokens(LTX2InContextPipeline, folder, request, **more)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("a clip", 1),
        ("a picture begins", 1),
        ("pictures too", 2),
        pytest.param("pictures too", 4, marks=pytest.mark.slow),
        pytest.param("a clip", 2, marks=pytest.mark.slow),
        pytest.param("a clip", 4, marks=pytest.mark.slow),
    ],
)
def test_latents_equal_those_of_the_classic_pipeline(name: str, num_ranks: int, folder: Path) -> None:
    request = request_of(name, folder)
    expected = own_latents(name, folder, request)
    assert expected.std() > 0.1
    for strategy in STRATEGIES[num_ranks]:
        for values in gang(num_ranks).run(
            denoised_from, folder, request, encoded(folder, request, along_with(name)), strategy
        ):
            tokens = values["latents"][:, : values["base_token_count"]]
            assert relative_difference(tokens, expected) <= TOLERANCE, strategy


def test_the_clip_matters_and_previews_have_the_results_size(folder: Path) -> None:
    request, pipeline = request_of("a clip", folder), load_pipeline(Checkpoint(folder))
    states = list(pipeline.states(request, along_with("a clip")))
    latents = pipeline.sampler.latents(states[-1])
    plain = pipeline.denoise(request_of("a clip", folder, num_video_frames=0))["latents"]
    assert relative_difference(latents["latents"][:, : latents["base_token_count"]], plain) > 10 * TOLERANCE
    made = pipeline.decoder.decode(latents, request)
    assert (made.shape, made.dtype) == ((NUM_FRAMES, *SIDES, 3), np.dtype(np.uint8))
    preview = pipeline.decoder.preview(pipeline.sampler.preview(states[1]), request)
    assert preview.shape == (1, *SIDES, 3)


@pytest.mark.parametrize("name", CASES)
def test_a_blank_clip_has_the_shapes_of_a_real_one(name: str, folder: Path) -> None:
    checkpoint, request = Checkpoint(folder), request_of(name, folder)
    sampler, encoder = checkpoint.sampler(), checkpoint.text_encoder()
    real = sampler.branches(sampler.begin(request, encoder.encode(request, along_with(name))))
    for blank, one in zip(checkpoint.first_step(request), real, strict=True):
        shapes = [{name: x.shape for name, x in branch.inputs.items()} for branch in (blank, one)]
        assert shapes[0].keys() == shapes[1].keys()
        assert shapes[0]["hidden_states"] == shapes[1]["hidden_states"]
        assert shapes[0]["hidden_states"][1] >= 2 * 18
