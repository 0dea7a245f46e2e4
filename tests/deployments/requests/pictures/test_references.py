"""A clip from references, from a client's request to its file, equals diffusers' own call."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import av
import numpy as np
import pytest
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference, MiniMaxH3VideoReference
from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep

from deployments.ingress import make_cards
from deployments.model_config import ModelConfig
from deployments.requests.handle import handle_request
from deployments.requests.request_errors import RequestError
from deployments.service.interface import Output
from deployments.stages.common import SentPictures, StageSpec
from deployments.stages.text_encoder import PromptEncoder
from deployments.stages.vae_decoder import VaeDecoder
from deployments.stages.warm_up import typical_requests
from engines.core.parcel import Parcel
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.media.clip import encode_clip
from pipelines.request import InputPictures, MediaRequest
from pipelines.size import Size
from tests.deployments.support.files import file_of
from tests.deployments.support.live import config_of
from tests.pipelines.support.checkpoints.tiny_minimax import LOAD_PROCESSOR, MiniMaxProcessor, minimax_h3_references
from tests.pipelines.support.references.own_call import own_state
from tests.pipelines.support.references.video import frames, picture

NUM_FRAMES = 120
SIZE = (96, 64)
FIELDS: dict[str, Any] = {
    "prompt": "<Picture 2> and <Video 1>",
    "size": f"{SIZE[0]}x{SIZE[1]}",
    "num_frames": NUM_FRAMES,
    "num_inference_steps": 2,
    "seed": 5,
    "generate_sound": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with a small default size, since stages run a model's typical request."""
    folder = minimax_h3_references(tmp_path_factory.mktemp("references"))
    (folder / "troupe.json").write_text(json.dumps({"width": SIZE[0], "height": SIZE[1], "num_frames": NUM_FRAMES}))
    return folder


@pytest.fixture(autouse=True)
def processor() -> Iterator[None]:
    with patch(LOAD_PROCESSOR, lambda *_, **__: MiniMaxProcessor()):
        yield


def clip_file(width: int, height: int, num_frames: int, fps: int = 24) -> bytes:
    return encode_clip(np.stack([np.asarray(frame) for frame in frames(width, height, num_frames)]), fps=fps)


def request_of(folder: Path, **fields: Any) -> tuple[MediaRequest, InputPictures]:
    request, _, pictures = handle_request(make_cards(config_of({"m": folder}).app), "id", {**FIELDS, **fields})
    return request, pictures


def own_frames(folder: Path, request: MediaRequest, pictures: InputPictures) -> Any:
    assert pictures.video is not None
    references: list[Any] = [MiniMaxH3ImageReference(image=one.image()) for one in pictures.pictures]
    references.append(MiniMaxH3VideoReference(frames=pictures.video.frames(), fps=24.0))
    steps = request.num_inference_steps + 1
    videos = own_state(folder, request, references=references, num_inference_steps=steps).get("videos")
    return np.rint(255 * videos[0][:NUM_FRAMES].movedim(1, -1).float().numpy())


def test_a_clip_of_references_is_that_of_diffusers(folder: Path) -> None:
    files = [file_of(picture(80, 50, 1)), file_of(picture(64, 96, 2))]
    request, pictures = request_of(folder, input_reference=files, video=clip_file(128, 80, 150))
    assert (request.num_pictures, request.num_video_frames) == (2, NUM_FRAMES), "cut to the length of the result"
    model, checkpoint = ModelConfig(name="m", path=str(folder)), Checkpoint(folder)
    engine, sampler = TorchEngine(checkpoint.denoiser()), checkpoint.sampler()
    encoder = PromptEncoder(StageSpec(model=model, stage=model.text_encoder))
    state = sampler.begin(request, encoder.encode_valid(request, SentPictures.of(pictures)).open())
    for _ in range(sampler.num_steps(state)):
        state = sampler.advance(state, engine.predict(sampler.branches(state), (0,)))
    latents = sampler.latents(state)
    made = checkpoint.decoder().decode_all(latents, request).frames_FHWC
    assert made.std() > 1
    assert np.abs(made.astype(int) - own_frames(folder, request, pictures)).max() <= 1
    decoder = VaeDecoder(StageSpec(model=model, stage=model.decoder))
    file = decoder.decode(Parcel.of(latents), request, Output(format="mp4"))
    with av.open(io.BytesIO(file.data), "r") as opened:
        assert len(list(opened.decode(video=0))) == NUM_FRAMES


def test_the_clip_or_else_the_first_picture_gives_the_shape(folder: Path) -> None:
    plain = {"size": None}
    request, _ = request_of(folder, **plain, input_reference=[file_of(picture(64, 96, 2))])
    assert (request.width, request.height) == (64, 96)
    request, pictures = request_of(folder, **plain, video=clip_file(64, 96, 30))
    assert (request.width, request.height, request.num_pictures) == (64, 96, 0)
    assert pictures.video is not None
    assert pictures.video.num_frames == request.num_video_frames == 30
    request, _ = request_of(folder, **plain, input_reference=[file_of(picture(96, 64, 2))], video=clip_file(64, 96, 30))
    assert (request.width, request.height, request.num_pictures) == (64, 96, 1), "it would be cropped to another shape"


@pytest.mark.parametrize(("own_fps", "fps"), [(12, None), (30, 60), (60, 1)])
def test_the_model_sees_a_clip_at_its_own_rate(own_fps: int, fps: int | None, folder: Path) -> None:
    """The rate of the result decides how fast it is played."""
    file = clip_file(*SIZE, 50, own_fps)
    request, pictures = request_of(folder, video=file, fps=fps)
    shown = MiniMaxH3VideoReference.from_file(file_path(folder, file))
    assert shown.fps == own_fps
    canvas = {"canvas_multiple": 32, "canvas_short_edge": SIZE[1], "canvas_max_pixels": SIZE[0] * SIZE[1]}
    own_FHWC = MiniMaxH3Ref2VASetupStep._normalize_video_condition(
        shown.frames, own_fps, NUM_FRAMES, target_fps=24.0, **canvas
    )
    assert pictures.video is not None
    assert (request.fps, request.num_video_frames) == (fps or 24, len(own_FHWC))
    assert np.array_equal(np.stack([np.asarray(frame) for frame in pictures.video.frames()]), own_FHWC)


def file_path(folder: Path, data: bytes) -> Path:
    path = folder / "clip.mp4"
    path.write_bytes(data)
    return path


def test_the_shortest_clip_is_encoded_at_any_rate(folder: Path) -> None:
    request, pictures = request_of(folder, video=clip_file(*SIZE, 13), fps=60)
    conditioning = Checkpoint(folder).text_encoder().encode(request, pictures)
    assert conditioning.values["normalized_references"] == ["video"]


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({}, "input_reference", "this model needs a reference"),
        ({"input_reference": [file_of(picture(32, 32))] * 10}, "input_reference", "takes from 0 to 9"),
        ({"input_reference": [file_of(picture(160, 32))]}, "input_reference", "at most 4 times the other"),
        ({"video": clip_file(64, 32, 12)}, "video", "video has 12 frames at the clip's rate; this model takes from 13"),
        ({"video": clip_file(64, 32, 30, 60), "fps": 60}, "video", "video has 12 frames at the clip's rate"),
        ({"input_reference": [file_of(picture(32, 32))], "frame_indices": [0]}, "frame_indices", "leave them out"),
    ],
)
def test_what_it_does_not_take_is_refused(folder: Path, fields: dict[str, Any], param: str, told: str) -> None:
    with pytest.raises(RequestError, match=told) as refused:
        request_of(folder, **fields)
    assert refused.value.param == param


def test_an_encoder_prepares_with_a_reference(folder: Path) -> None:
    defaults = Checkpoint(folder).defaults
    for sizes in ((), (Size(width=SIZE[0], height=SIZE[1], num_frames=NUM_FRAMES),)):
        ((request, inputs),) = typical_requests(defaults, sizes)
        assert request.num_pictures == len(inputs.pictures) == 1
