"""Encoder and decoder serve a request for layers, with the tiny model of a picture's layers."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from deployments.ingress import make_cards
from deployments.model_config import ModelConfig
from deployments.requests.handle import handle_request
from deployments.service.interface import MediaFormat, Output
from deployments.stages.common import SentPictures, StageSpec
from deployments.stages.text_encoder import PromptEncoder
from deployments.stages.vae_decoder import VaeDecoder
from engines.core.parcel import Parcel
from pipelines.checkpoint import Checkpoint
from tests.deployments.support.files import file_of, noise
from tests.deployments.support.live import config_of
from tests.pipelines.support.checkpoints import tiny_qwen


@pytest.fixture(autouse=True)
def processor() -> Iterator[None]:
    with patch("transformers.Qwen2VLProcessor.from_pretrained", lambda *_, **__: tiny_qwen.QwenProcessor()):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_qwen.qwen_layered(tmp_path_factory.mktemp("layers"))
    own = {"width": 64, "height": 32, "num_layers": 2, "max_layers": 3, "num_inference_steps": 1}
    (folder / "troupe.json").write_text(json.dumps(own))
    return folder


@pytest.fixture(scope="module")
def decoder(folder: Path) -> VaeDecoder:
    return VaeDecoder(spec_of(folder))


def spec_of(folder: Path) -> StageSpec:
    model = ModelConfig(name="m", path=str(folder))
    return StageSpec(model=model, stage=model.decoder)


@pytest.mark.parametrize("format", ["png", "webp"])
def test_each_layer_is_a_file(folder: Path, decoder: VaeDecoder, format: MediaFormat) -> None:
    fields = {"prompt": "", "image": file_of(noise(90, 45, seed=1)), "layers": 3, "seed": 5, "output_format": format}
    request, output, pictures = handle_request(make_cards(config_of({"m": folder}).app), "id", fields)
    assert (request.width, request.height) == (64, 32)
    checkpoint = Checkpoint(folder)
    sampler = checkpoint.sampler()
    state = sampler.begin(
        request, PromptEncoder(spec_of(folder)).encode_valid(request, SentPictures.of(pictures)).open()
    )
    latents = sampler.latents(state)
    decoded = decoder.decode(Parcel.of(latents), request, output)
    expected_FHWC = checkpoint.decoder().decode(latents, request)
    images = [Image.open(io.BytesIO(file)) for file in (decoded.data, *decoded.further)]
    assert {(image.format, image.mode) for image in images} == {(format.upper(), "RGBA")}
    layers_FHWC = np.stack([np.asarray(image) for image in images])
    assert layers_FHWC.shape == expected_FHWC.shape == (3, 32, 64, 4)
    shown = slice(None) if format == "png" else slice(3, None)  # WebP keeps opacity exactly, but not colour
    np.testing.assert_array_equal(layers_FHWC[..., shown], expected_FHWC[..., shown])
    preview = Image.open(io.BytesIO(decoder.preview(Parcel.of(latents), request)))
    assert (preview.format, preview.mode, preview.size) == ("PNG", "RGB", (64, 32))


def test_a_format_without_opacity_is_refused(folder: Path, decoder: VaeDecoder) -> None:
    request = Checkpoint(folder).defaults.request()
    latents = Parcel.of(Checkpoint(folder).first_latents(request))
    with pytest.raises(ValueError, match="jpeg has no opacity; use png or webp"):
        decoder.decode(latents, request, Output(format="jpeg"))
