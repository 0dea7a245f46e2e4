"""A decoder's files have settings, and are signed as configured."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import av
import c2pa
import numpy as np
import pytest
from PIL import Image

from deployments.config import ProvenanceConfig
from deployments.model_config import ModelConfig
from deployments.service.interface import MediaFormat, Output
from deployments.stages.common import SentPictures, StageSpec
from deployments.stages.text_encoder import PromptEncoder
from deployments.stages.vae_decoder import Codec, VaeDecoder
from engines.core.parcel import Parcel
from pipelines.checkpoint import Checkpoint
from pipelines.request import NO_PICTURES
from tests.support.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def decoder_of(path: Path, authority: Authority | None) -> VaeDecoder:
    model, provenance = ModelConfig(name="m", path=str(path)), None
    if authority is not None:
        issued = authority.issue("Paint Inc")
        provenance = ProvenanceConfig(certificate=issued.certificate, key=issued.key)
    return VaeDecoder(StageSpec(model=model, stage=model.decoder, provenance=provenance))


def action_of(data: bytes, mime_type: str, authority: Authority) -> dict[str, Any]:
    context = c2pa.Context.from_dict({"trust": {"user_anchors": authority.anchor}})
    with c2pa.Reader(mime_type, io.BytesIO(data), context=context) as reader:
        assert reader.get_validation_state() == "Trusted"
        action: dict[str, Any] = reader.get_active_manifest()["assertions"][0]["data"]["actions"][0]
        return action


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_a_picture_has_settings_and_a_manifest(pictures: Path, authority: Authority, format: MediaFormat) -> None:
    checkpoint = Checkpoint(pictures)
    request = checkpoint.defaults.request(prompt="a red circle", model="m", seed=3)
    latents = Parcel.of(checkpoint.first_latents(request))
    signed = decoder_of(pictures, authority).decode(latents, request, Output(format=format)).data
    plain = decoder_of(pictures, None).decode(latents, request, Output(format=format)).data
    action = action_of(signed, f"image/{format}", authority)
    assert (action["action"], action["parameters"]["model"]) == ("c2pa.created", "m")
    assert action["digitalSourceType"].endswith("/trainedAlgorithmicMedia")
    one, other = (Image.open(io.BytesIO(data)) for data in (signed, plain))
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    if format == "png":
        assert json.loads(one.info["troupe"])["prompt"] == "a red circle"
    assert len(plain) < len(signed)


def test_a_clip_has_settings_and_a_manifest(clips: Path, authority: Authority) -> None:
    checkpoint = Checkpoint(clips)
    request = checkpoint.defaults.request(prompt="a red circle", model="m", seed=3)
    latents = Parcel.of(checkpoint.first_latents(request))
    data = decoder_of(clips, authority).decode(latents, request, Output(format="mp4")).data
    assert action_of(data, "video/mp4", authority)["parameters"]["model"] == "m"
    with av.open(io.BytesIO(data), "r") as container:
        assert json.loads(container.metadata["description"])["seed"] == 3
        assert sum(1 for _ in container.decode(video=0)) == request.num_frames
    assert 0 < data.index(b"moov") < data.index(b"mdat"), "it plays while it loads"


def test_an_encoder_and_a_decoder_in_one_process_share_no_name(pictures: Path) -> None:
    model = ModelConfig(name="m", path=str(pictures), stages="together")
    codec = Codec(StageSpec(model=model, stage=model.text_encoder))
    own = [name for name in vars(PromptEncoder).keys() & vars(VaeDecoder).keys() if not name.startswith("__")]
    assert own == []
    request = Checkpoint(pictures).defaults.request(prompt="a")
    latents = Parcel.of(Checkpoint(pictures).first_latents(request))
    codec.encode(request, SentPictures.of(NO_PICTURES))
    assert codec.decode(latents, request, Output(format="png")).data.startswith(b"\x89PNG")
