"""Pictures reach an encoder unchanged, through Serve, and without an earlier copy."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray import serve
from ray.serve.config import ProxyLocation
from ray.serve.handle import DeploymentHandle

from deployments.model_config import ModelConfig
from deployments.stages.common import SentPictures, StageSpec, StageWeights, Workers
from deployments.stages.text_encoder import ConditioningCache, PromptEncoder
from pipelines.checkpoint import Checkpoint
from pipelines.request import NO_PICTURES, InputPicture, InputPictures, InputVideo, MediaRequest
from tests.deployments.stages.test_stages import spec_of
from tests.deployments.support.fake_service import EDITS
from tests.deployments.support.files import noise
from tests.pipelines.support.checkpoints import tiny_models

INPUTS = InputPictures(
    pictures=(InputPicture.of(noise(640, 480)), InputPicture.of(noise(7, 5, "RGBA"))),
    mask=InputPicture.of(noise(640, 480, "L")),
    control=InputPicture.of(noise(64, 48)),
    video=InputVideo(width=64, height=48, num_frames=5, fps=8, data=noise(64, 5 * 48).tobytes()),
)
REQUEST = EDITS.request(prompt="a", num_pictures=2, has_mask=True)


@pytest.mark.parametrize("inputs", [INPUTS, NO_PICTURES], ids=["pictures", "none"])
def test_they_arrive_as_they_were(inputs: InputPictures) -> None:
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(SentPictures.of(inputs), protocol=5, buffer_callback=buffers.append)
    assert pickle.loads(message, buffers=buffers).open() == inputs
    assert len(message) < 2000, "pixels travel beside the message, as Ray's object store wants them"


def test_packing_copies_nothing() -> None:
    pixels = SentPictures.of(INPUTS).pictures[0].pixels
    assert np.shares_memory(pixels, np.frombuffer(INPUTS.pictures[0].data, np.uint8))


class PictureValues(list[torch.Tensor]):
    """Pictures in place of conditioning."""

    noise = None

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((str(number), tuple(x.shape)) for number, x in enumerate(self))


class Looker:
    """An encoder whose conditioning is the pictures."""

    def encode(self, request: MediaRequest, pictures: InputPictures) -> Any:
        assert len(pictures.pictures) == request.num_pictures
        images = [*pictures.pictures, *([pictures.mask] if pictures.mask else [])]
        return PictureValues(torch.from_numpy(np.array(one.image())) for one in images)


class LookingEncoder(PromptEncoder):
    def __init__(self) -> None:
        looker: Any = Looker()
        self._encoder, self._encoding, self._cache = looker, Workers(1, "encoding"), ConditioningCache(0)
        model = ModelConfig(name="flux-shapes")
        self._weights = StageWeights(StageSpec(model=model, stage=model.text_encoder), "text_encoder")


@pytest.fixture
async def handle(ray_cluster: None) -> AsyncIterator[DeploymentHandle[Any]]:
    deployment = serve.deployment(ray_actor_options={"num_cpus": 0.1})(LookingEncoder)
    serve.start(proxy_location=ProxyLocation.Disabled)
    yield serve.run(deployment.bind(), name="looking", route_prefix=None)
    serve.shutdown()  # type: ignore[no-untyped-call]


async def test_they_reach_an_encoder_through_serve(handle: DeploymentHandle[Any]) -> None:
    encoded = await handle.encode.remote(REQUEST, SentPictures.of(INPUTS))
    first, second, mask = encoded.open()
    assert INPUTS.mask is not None
    expected = [*(one.image() for one in INPUTS.pictures), INPUTS.mask.image()]
    for tensor, image in zip((first, second, mask), expected, strict=True):
        assert (tensor.numpy() == np.asarray(image)).all()


def test_a_model_makes_of_them_what_it_does_without_deployments(tmp_path: Path) -> None:
    path = tiny_models.flux2_klein(tmp_path)
    checkpoint, encoder = Checkpoint(path), PromptEncoder(spec_of(path))
    inputs = InputPictures(pictures=(InputPicture.of(noise(96, 64)),))
    request = checkpoint.defaults.request(prompt="a", num_pictures=1)
    encoded = encoder.encode_valid(request, SentPictures.of(inputs)).open()
    torch.testing.assert_close(encoded.values, checkpoint.text_encoder().encode(request, inputs).values, rtol=0, atol=0)
    words = encoder.encode_valid(checkpoint.defaults.request(prompt="a")).open()
    assert set(words.values) < set(encoded.values), "there is more with a picture"
