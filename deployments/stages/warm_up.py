"""What stages do before anybody asks, so that the first picture takes them no longer than others."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deployments.stages.common import StageSpec
from deployments.stages.config import StageConfig
from deployments.stages.devices import host_lock
from deployments.studio.interface import MediaFormat, Output
from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from pipelines.pictures import NO_PICTURES, InputPicture, InputPictures, Mode
from pipelines.request import MediaKind, MediaRequest
from pipelines.size import Size

if TYPE_CHECKING:
    from pipelines.blocks.decoder import BlocksDecoder
    from pipelines.blocks.encoder import BlocksEncoder

logger = logging.getLogger(__name__)

PROMPT = "a red circle"
CAPTURED_AFTER = 3
"""What is compiled runs once as it is, is then recorded as a CUDA graph, and from then on replayed."""
GREY = b"\x80"
FORMATS: Mapping[MediaKind, tuple[MediaFormat, ...]] = {"image": ("png", "jpeg", "webp"), "video": ("mp4",)}


def typical_requests(defaults: Defaults, sizes: tuple[Size, ...]) -> Iterator[tuple[MediaRequest, InputPictures]]:
    """One of words, unless the model wants pictures beside them; and where it takes some, with one of each size.

    Without sizes a clip that begins with a picture has few frames: some encoders read them all, which takes a CPU
    minutes.
    """
    if not defaults.min_pictures:
        yield defaults.request(prompt=PROMPT), NO_PICTURES
    if defaults.max_pictures:
        for size in sizes or (_shortest(defaults),):
            request = defaults.request(size, prompt=PROMPT, num_pictures=max(1, defaults.min_pictures))
            mask = _grey(request, "L") if request.has_mask else None
            yield request, InputPictures(pictures=(_grey(request),) * request.num_pictures, mask=mask)
    for kind in defaults.kinds[1:]:
        yield from typical_requests(defaults.of(kind), sizes)


def _shortest(defaults: Defaults) -> Size:
    """Return the usual size, and of a clip as few frames as make one."""
    num_frames = max(defaults.min_frames, 1 + defaults.frame_multiple) if defaults.kind == "video" else None
    return Size(width=defaults.width, height=defaults.height, num_frames=num_frames)


def _grey(request: MediaRequest, mode: Mode = "RGB") -> InputPicture:
    data = GREY * (request.width * request.height * len(mode))
    return InputPicture(width=request.width, height=request.height, mode=mode, data=data)


def warm_encoder(encoder: BlocksEncoder, spec: StageSpec, checkpoint: Checkpoint) -> None:
    """Encode what is typical of the model."""
    num_runs = CAPTURED_AFTER if spec.model.text_encoder.compile else 1
    with in_turn(spec.stage), encoder.compile_calls():
        for request, pictures in typical_requests(checkpoint.defaults, spec.model.denoiser.warm_sizes):
            for _ in range(num_runs):
                encoder.encode(request, pictures)


def warm_decoder(decoder: BlocksDecoder, spec: StageSpec, checkpoint: Checkpoint) -> NDArray[np.uint8]:
    """Decode each size that the gang prepares, and a preview; returns a frame, for what makes bytes of frames.

    Without such sizes it is a preview of the model's own: all frames of a clip take a CPU longer than they spare.
    """
    defaults, sizes = checkpoint.defaults, spec.model.denoiser.warm_sizes
    if not checkpoint.spec.has_known_conditioning:
        logger.info("nothing is decoded before the first request: %s is not known here", checkpoint.spec.family)
        return np.zeros((1, defaults.height, defaults.width, 3), np.uint8)
    with in_turn(spec.stage):
        with decoder.compile_calls():
            for request in map(defaults.request, sizes):
                decoder.decode_all(checkpoint.first_latents(request), request)
        request = defaults.request(sizes[0] if sizes else None)
        return decoder.preview(checkpoint.first_latents(request), request)[:1]


@contextmanager
def in_turn(stage: StageConfig) -> Iterator[None]:
    """What a stage does on a GPU inside disturbs no gang that times its steps there."""
    lock = host_lock(stage.num_gpus)
    with lock.shared() if lock is not None else nullcontext():
        yield


def outputs(defaults: Defaults) -> tuple[tuple[MediaRequest, Output], ...]:
    """One in each format that clients may ask for."""
    requests = [defaults.of(kind).request() for kind in defaults.kinds]
    return tuple((request, Output(format=format)) for request in requests for format in FORMATS[request.kind])
