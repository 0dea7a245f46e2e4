"""A model of clips makes a picture, from a request to its file, equal to diffusers' own one-frame call."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from deployments.door.haproxy import may_draw
from deployments.ingress import make_cards
from deployments.model_config import ModelConfig
from deployments.requests.bodies import ImageBody
from deployments.requests.images import ImageRequest
from deployments.requests.model_choice import choose_card
from deployments.requests.rules import Requester, ResolvedRequest
from deployments.stages.common import Decoded, StageSpec
from deployments.stages.text_encoder import PromptEncoder
from deployments.stages.vae_decoder import VaeDecoder
from deployments.stages.warm_up import outputs, typical_requests
from engines.core.model import Branch
from engines.core.parcel import Parcel
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.size import Size
from tests.deployments.support.live import config_of
from tests.pipelines.support.checkpoints import tiny_cosmos

PROMPT, SEED, STEPS = "a red circle", 5, 3
SIZE = (48, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with small clips and pictures, since stages run a model's typical request."""
    folder = tiny_cosmos.cosmos_with_sound(tmp_path_factory.mktemp("clips"))
    own = {"width": 32, "height": 32, "num_frames": 5, "picture_width": SIZE[0], "picture_height": SIZE[1]}
    (folder / "troupe.json").write_text(json.dumps(own))
    return folder


def image_request(folder: Path, **more: object) -> ImageRequest:
    """Return the API's request for a body without a size."""
    cards = make_cards(config_of({"m": folder}).app)
    fields = {"prompt": PROMPT, "num_inference_steps": STEPS, "seed": SEED, **more}
    resolved = ResolvedRequest(card=choose_card(cards, None, "image"), body=ImageBody.model_validate(fields))
    return ImageRequest.of(resolved, Requester(request_id="id"), max_n=4)


def picture_and_preview(folder: Path, request: MediaRequest, pictures: ImageRequest) -> tuple[Decoded, bytes]:
    """Return the finished picture, and a preview after the first step."""
    model = ModelConfig(name="m", path=str(folder))
    checkpoint = Checkpoint(folder)
    engine, sampler = TorchEngine(checkpoint.denoiser()), checkpoint.sampler()
    conditioning = PromptEncoder(StageSpec(model=model, stage=model.text_encoder)).encode_valid(request)
    state, previews = sampler.begin(request, conditioning.open()), []
    for _ in range(sampler.num_steps(state)):
        state = sampler.advance(state, engine.predict(sampler.branches(state), (0,)))
        previews.append(sampler.preview(state))
    decoder = VaeDecoder(StageSpec(model=model, stage=model.decoder))
    decoded = decoder.decode(Parcel.of(sampler.latents(state)), request, pictures.output)
    return decoded, decoder.preview(Parcel.of(previews[0]), request)


def by_diffusers(folder: Path, seed: int) -> NDArray[np.uint8]:
    pipeline = diffusers.Cosmos3OmniPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    (frame,) = pipeline(
        prompt=PROMPT,
        num_frames=1,
        width=SIZE[0],
        height=SIZE[1],
        num_inference_steps=STEPS,
        guidance_scale=6.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="pil",
    ).video
    return np.asarray(frame.convert("RGB"))


def test_pictures_are_those_of_diffusers(folder: Path) -> None:
    pictures = image_request(folder, n=2, stream=True, partial_images=1)
    for number, request in enumerate(pictures.requests):
        assert (request.kind, request.num_frames, request.fps, request.sound) == ("image", 1, 0, None)
        decoded, preview = picture_and_preview(folder, request, pictures)
        image = Image.open(io.BytesIO(decoded.data))
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", SIZE)
        assert (decoded.further, decoded.thumbnail) == ((), b"")
        expected_HWC = by_diffusers(folder, SEED + number)
        assert expected_HWC.std() > 1
        assert np.abs(np.asarray(image).astype(int) - expected_HWC).max() <= 1
        shown = Image.open(io.BytesIO(preview))
        assert (shown.format, shown.size) == ("PNG", SIZE)


@pytest.mark.parametrize("format", ["jpeg", "webp"])
def test_a_picture_is_a_file_as_it_was_asked_for(folder: Path, format: str) -> None:
    pictures = image_request(folder, output_format=format, output_compression=80)
    (request,) = pictures.requests
    decoded, _ = picture_and_preview(folder, request, pictures)
    image = Image.open(io.BytesIO(decoded.data))
    assert (image.format, image.size) == (format.upper(), SIZE)


def test_stages_prepare_for_clips_and_pictures(folder: Path) -> None:
    defaults = Checkpoint(folder).defaults
    assert {(request.kind, output.format) for request, output in outputs(defaults)} == {
        ("video", "mp4"),
        *(("image", format) for format in ("png", "jpeg", "webp")),
    }
    typical = [(request.kind, request.num_pictures) for request, _ in typical_requests(defaults, ())]
    assert typical == [("video", 0), ("video", 1), ("image", 0)]


def test_an_encoder_prepares_with_a_clip_where_one_is_needed(folder: Path) -> None:
    defaults = replace(Checkpoint(folder).defaults, max_pictures=0, picture_width=0, max_video_frames=49)
    changes = replace(defaults, needs_video=True, keeps_length=True)
    ((request, inputs),) = typical_requests(changes, ())
    assert inputs.video is not None
    assert request.num_frames == request.num_video_frames == inputs.video.num_frames
    assert len(inputs.video.data) == 3 * request.width * request.height * request.num_frames
    assert [inputs.video for _, inputs in typical_requests(defaults, ())] == [None]
    both = replace(changes, min_pictures=1, max_pictures=1, takes_both=True)
    ((request, inputs),) = typical_requests(both, ())
    assert (request.num_pictures, len(inputs.pictures)) == (1, 1)
    assert inputs.video is not None
    assert inputs.video.num_frames == request.num_video_frames > 0


@pytest.mark.parametrize(
    "name", ["Cosmos3-Nano", "Wan2.2-I2V-A14B", "LTX-2", "Helios-Base", "MiniMax-H3", "Wan2.1-VACE-14B"]
)
def test_an_encoder_prepares_for_few_frames_where_no_size_is_named(name: str) -> None:
    """Wan VACE encodes all frames of a clip that is made of words, too."""
    defaults = Checkpoint.of_configuration(name).defaults
    begun = [request for request, _ in typical_requests(defaults, ()) if request.kind == "video"]
    assert any(request.num_pictures for request in begun)
    for request in begun:
        assert (request.width, request.height) == (defaults.width, defaults.height)
        assert request.num_frames <= max(defaults.min_frames, 1 + defaults.frame_multiple) < defaults.num_frames
    size = Size(width=defaults.width, height=defaults.height, num_frames=defaults.num_frames)
    named = [request for request, _ in typical_requests(defaults, (size,)) if request.kind == "video"]
    assert {request.num_frames for request in named} == {defaults.num_frames}


def test_a_warm_size_of_one_frame_is_a_picture_s(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    (warm,) = checkpoint.first_steps([Size(width=SIZE[0], height=SIZE[1], num_frames=1)], ("transformer",))
    asked_for = checkpoint.first_step(checkpoint.defaults.of("image").request())
    assert [shape_of(branch) for branch in warm] == [shape_of(branch) for branch in asked_for]


def shape_of(branch: Branch) -> object:
    return {name: x.shape for name, x in branch.inputs.items()}, branch.constants


def test_such_a_model_has_places_at_the_door(folder: Path) -> None:
    assert may_draw(ModelConfig(name="m", path=str(folder)))
    assert not may_draw(ModelConfig(name="wan-shapes"))
