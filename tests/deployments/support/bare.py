"""The bare pipeline's result for a request, in this process, and comparisons of pictures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from deployments.ingress import make_cards
from deployments.requests.handle import handle_request
from pipelines.checkpoint import Checkpoint
from pipelines.request import InputPictures, MediaRequest
from pipelines.run import load_pipeline
from tests.deployments.support.live import PROMPT, SMALL, config_of, log_lines
from tests.pipelines.support.references.frames import painted


def bare_request(models: dict[str, Path], **fields: Any) -> tuple[MediaRequest, InputPictures]:
    cards = make_cards(config_of(models).app)
    request, _, pictures = handle_request(cards, "bare", {"prompt": PROMPT, **SMALL, **fields})
    return request, pictures


def bare_frames(models: dict[str, Path], **fields: Any) -> NDArray[Any]:
    """Return the bare pipeline's result for the same fields, in this process."""
    request, pictures = bare_request(models, **fields)
    return painted(models[request.model], request, pictures)


def bare_previews(models: dict[str, Path], **fields: Any) -> list[NDArray[Any]]:
    request, _ = bare_request(models, partial_images=3, **fields)
    pipeline = load_pipeline(Checkpoint(models[request.model]))
    states = list(pipeline.states(request))
    latents = [pipeline.sampler.preview(states[step]) for step in request.preview_steps]
    return [pipeline.decoder.decode(one, request)[0] for one in latents]


def assert_same_picture(one_HWC: NDArray[Any], other_HWC: NDArray[Any], within: int = 1) -> None:
    assert one_HWC.shape == other_HWC.shape
    assert np.abs(one_HWC.astype(int) - other_HWC).max() <= within


def assert_alike(one: NDArray[Any], other: NDArray[Any]) -> None:
    """Check equality up to lossy compression: means over 8x8 pixels are near. Shapes (..., height, width, 3)."""
    assert one.shape == other.shape
    assert np.abs(block_means(one) - block_means(other)).max() < 16
    assert np.abs(block_means(one) - block_means(other[..., ::-1, :])).max() > 16, "the measure sees a mirrored picture"


def block_means(pixels: NDArray[Any]) -> NDArray[Any]:
    *frames, height, width, channels = pixels.shape
    means: NDArray[Any] = pixels.reshape(*frames, height // 8, 8, width // 8, 8, channels).mean(axis=(-4, -2))
    return means


def frames_of(data: bytes) -> list[NDArray[Any]]:
    with av.open(io.BytesIO(data), "r") as container:
        assert container.streams.video[0].codec_context.name == "h264"
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def begun(request_id: str) -> list[int]:
    """Return the ranks on which jobs of the request have begun."""
    lines = log_lines("job begins")
    return sorted(line["rank"] for line in lines if line["request_id"].startswith(request_id))


BAD_BODIES = [
    ({"prompt": ""}, 400, "prompt"),
    ({}, 400, "prompt"),
    ({"prompt": PROMPT, "size": "63x64"}, 400, "size"),
    ({"prompt": PROMPT, "size": "32000x32000"}, 400, "size"),
    ({"prompt": PROMPT, "num_inference_steps": 0}, 400, "num_inference_steps"),
    ({"prompt": PROMPT, "num_inference_steps": 101}, 400, "num_inference_steps"),
    ({"prompt": PROMPT, "seed": -2}, 400, "seed"),
    ({"prompt": PROMPT, "seed": "1"}, 400, "seed"),
    ({"prompt": PROMPT, "n": 5}, 400, "n"),
    ({"prompt": PROMPT, "sed": 1}, 400, "sed"),
    ({"prompt": PROMPT, "negative_prompt": "blue"}, 400, "negative_prompt"),
    ({"prompt": PROMPT, "model": "wan-shapes"}, 400, "model"),
    ({"prompt": PROMPT, "model": "dall-e"}, 404, "model"),
    ({"prompt": PROMPT, "user": "u" * 100_001}, 413, None),
]
