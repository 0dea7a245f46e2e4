"""A picture split into layers equals diffusers' classic pipeline, which has no modular blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import diffusers
import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.qwenimage.prompt_templates import QWENIMAGE_LAYERED_CAPTION_PROMPT_EN
from PIL import Image
from torch import Tensor

from engines.core.tensors import relative_difference
from pipelines.checkpoint import Checkpoint
from pipelines.request import InputPicture, InputPictures, MediaRequest
from pipelines.run import Pipeline, load_pipeline
from pipelines.size import Size
from tests.pipelines.support.checkpoints import tiny_qwen
from tests.pipelines.support.references.picture_cases import drawn

TOLERANCE = 1e-4
"""Relative, in float32: other code packs and unpacks the latents."""
SIZES = "diffusers.pipelines.qwenimage.pipeline_qwenimage_layered.calculate_dimensions"
NUM_LAYERS = 3
SIZE = Size(width=64, height=32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tiny_qwen.qwen_layered(tmp_path_factory.mktemp("layers")))


@pytest.fixture(autouse=True)
def processor() -> Iterator[None]:
    with patch("transformers.Qwen2VLProcessor.from_pretrained", lambda *_, **__: tiny_qwen.QwenProcessor()):
        yield


@pytest.fixture(scope="module")
def pipeline(checkpoint: Checkpoint) -> Pipeline:
    with patch("transformers.Qwen2VLProcessor.from_pretrained", lambda *_, **__: tiny_qwen.QwenProcessor()):
        return load_pipeline(checkpoint)


def half_seen() -> Image.Image:
    """Return a picture whose right half is almost transparent."""
    picture = drawn(90, 45, seed=1).convert("RGBA")
    picture.putalpha(Image.fromarray(np.repeat(np.where(np.arange(90) < 45, 255, 40)[None], 45, 0).astype(np.uint8)))
    return picture


def request_of(checkpoint: Checkpoint, **changes: Any) -> MediaRequest:
    said = {"prompt": "a red circle", "negative_prompt": "b", "num_inference_steps": 2, "seed": 5}
    return checkpoint.defaults.request(SIZE, **{**said, "num_layers": NUM_LAYERS, **changes})


def denoised(pipeline: Pipeline, request: MediaRequest, picture: Image.Image) -> Mapping[str, Any]:
    return pipeline.denoise(request, InputPictures(pictures=(InputPicture.of(picture),)))


def theirs(checkpoint: Checkpoint, request: MediaRequest, picture: Image.Image) -> tuple[Tensor, list[Image.Image]]:
    """Return latents and layers. On the model's card guidance rescales its prediction, and captions are English; the
    classic pipeline breaks the caption prompt's lines."""
    classic = diffusers.QwenImageLayeredPipeline.from_pretrained(checkpoint.path)
    classic.set_progress_bar_config(disable=True)
    classic.image_caption_prompt_en = QWENIMAGE_LAYERED_CAPTION_PROMPT_EN
    latents: list[Tensor] = []

    def after_step(_pipeline: Any, _step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents.append(values["latents"])
        return values

    with patch(SIZES, lambda area, ratio: (SIZE.width, SIZE.height)):
        output = classic(
            image=picture.convert("RGBA"),
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            true_cfg_scale=request.true_cfg_scale,
            layers=request.num_layers,
            num_inference_steps=request.num_inference_steps,
            generator=torch.Generator().manual_seed(request.seed),
            cfg_normalize=True,
            use_en_prompt=True,
            callback_on_step_end=after_step,
        )
    return latents[-1], output.images[0]


def packed(latents_BCFHW: Tensor) -> Tensor:
    batch, channels, frames, height, width = latents_BCFHW.shape
    patches = latents_BCFHW.reshape(batch, channels, frames, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 3, 5, 1, 4, 6).reshape(batch, -1, channels * 4)


def test_layers_equal_the_classic_pipelines(checkpoint: Checkpoint, pipeline: Pipeline) -> None:
    request = request_of(checkpoint)
    expected, layers = theirs(checkpoint, request, half_seen())
    expected_FHWC = np.stack([np.asarray(layer) for layer in layers])
    assert expected.std() > 0.1
    assert expected_FHWC[..., 3].std() > 10, "opacity says nothing here"
    latents, decoder = denoised(pipeline, request, half_seen()), pipeline.decoder
    assert relative_difference(packed(latents["latents"]), expected) <= TOLERANCE
    for layers_FHWC in (decoder.decode(latents, request), decoder.decode_all(latents, request).frames_FHWC):
        assert layers_FHWC.shape == expected_FHWC.shape == (NUM_LAYERS, SIZE.height, SIZE.width, 4)
        assert np.abs(layers_FHWC.astype(int) - expected_FHWC).max() <= 1
    opaque = denoised(pipeline, request, half_seen().convert("RGB"))
    assert relative_difference(packed(opaque["latents"]), expected) > 10 * TOLERANCE, "opacity is not seen"


def test_a_preview_is_one_opaque_picture(checkpoint: Checkpoint, pipeline: Pipeline) -> None:
    """The layers are composited by the arithmetic of Porter and Duff (1984) in floating point."""
    request = request_of(checkpoint)
    pictures = InputPictures(pictures=(InputPicture.of(half_seen()),))
    _, state, *_ = pipeline.states(request, pictures)
    latents = pipeline.sampler.preview(state)
    preview_FHWC = pipeline.decoder.preview(latents, request)
    assert preview_FHWC.shape == (1, SIZE.height, SIZE.width, 3)
    expected_HWC = np.ones((SIZE.height, SIZE.width, 3))
    for layer_HWC in pipeline.decoder.decode(latents, request) / 255:
        cover_HW1 = layer_HWC[..., 3:]
        expected_HWC = layer_HWC[..., :3] * cover_HW1 + expected_HWC * (1 - cover_HW1)
    assert np.abs(preview_FHWC[0] / 255 - expected_HWC).max() < 4 / 255


def test_without_words_the_model_describes_the_picture(checkpoint: Checkpoint, pipeline: Pipeline) -> None:
    alone = {"true_cfg_scale": 1.0, "num_layers": 1}
    silent, said = (request_of(checkpoint, prompt=prompt, **alone) for prompt in ("", "a red circle"))
    expected, _ = theirs(checkpoint, silent, half_seen())
    assert relative_difference(packed(denoised(pipeline, silent, half_seen())["latents"]), expected) <= TOLERANCE
    assert relative_difference(packed(denoised(pipeline, said, half_seen())["latents"]), expected) > 10 * TOLERANCE


@pytest.mark.parametrize(("width", "height"), [(640, 640), (3000, 2000), (300, 500), (1001, 777), (160, 1600)])
def test_shapes_are_those_of_the_model(checkpoint: Checkpoint, width: int, height: int) -> None:
    """Diffusers' own rule for its two sizes is within the limits."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_layered import calculate_dimensions

    for side in (640, 1024):
        checkpoint.defaults.check_size(*calculate_dimensions(side * side, width / height))


@pytest.mark.parametrize("num_layers", [-1, 0, 11])
def test_the_number_of_layers_has_limits(checkpoint: Checkpoint, num_layers: int) -> None:
    with pytest.raises(ValueError, match=f"layers is {num_layers}; it must be from 1 to 10"):
        request_of(checkpoint, num_layers=num_layers)
