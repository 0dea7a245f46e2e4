"""Warm-up of encoders and decoders, so that the first request is as fast as later ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deployments.service.interface import MediaFormat, Output
from deployments.stages.common import StageSpec
from deployments.stages.devices import host_lock, stage_devices
from deployments.stages.stage_config import StageConfig
from engines.warm_up import release_unused_memory
from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from pipelines.request import NO_PICTURES, InputPicture, InputPictures, InputVideo, MediaKind, MediaRequest, Mode
from pipelines.size import Size

if TYPE_CHECKING:
    from pipelines.blocks.decoder import BlocksDecoder
    from pipelines.blocks.encoder import BlocksEncoder

logger = logging.getLogger(__name__)

PROMPT = "a red circle"
NUM_COMPILED_RUNS = 2
"""Runs of a call that is prepared: one that compiles or captures it, and one like all later ones."""
GREY = b"\x80"
FORMATS: Mapping[MediaKind, tuple[MediaFormat, ...]] = {"image": ("png", "jpeg", "webp"), "video": ("mp4",)}


def typical_requests(defaults: Defaults, sizes: tuple[Size, ...]) -> Iterator[tuple[MediaRequest, InputPictures]]:
    """Yield a request without pictures, if the model allows it, and one with inputs for each of ``sizes``.

    Without sizes, clips have few frames: some encoders read all frames, which takes minutes on a CPU.
    """
    fitting = tuple(size for size in sizes if _fits(size, defaults)) or (_shortest(defaults),)
    if defaults.takes_words_alone:
        request = defaults.request(fitting[0], prompt=PROMPT)
        yield request, InputPictures(control=_grey(request)) if request.has_control else NO_PICTURES
    if defaults.max_pictures:
        for size in fitting:
            request = defaults.request(size, prompt=PROMPT, num_pictures=max(1, defaults.min_pictures))
            mask = _grey(request, "L") if request.has_mask else None
            control = _grey(request) if request.has_control else None
            pictures = (_grey(request),) * request.num_pictures
            video = _grey_clip(request) if request.num_video_frames else None
            yield request, InputPictures(pictures=pictures, mask=mask, control=control, video=video)
    if defaults.needs_video and not defaults.min_pictures:
        for size in fitting:
            request = defaults.request(size, prompt=PROMPT)
            yield request, InputPictures(video=_grey_clip(request))
    for kind in defaults.kinds[1:]:
        yield from typical_requests(defaults.of(kind), sizes)


def _fits(size: Size, defaults: Defaults) -> bool:
    """Return whether requests of this kind may have ``size``. One frame is a picture's."""
    return size.num_frames in {None, 1} if defaults.kind == "image" else size.num_frames != 1


def _shortest(defaults: Defaults) -> Size:
    """Return the default size, for clips with the fewest frames."""
    num_frames = max(defaults.min_frames, 1 + defaults.frame_multiple) if defaults.kind == "video" else None
    return Size(width=defaults.width, height=defaults.height, num_frames=num_frames)


def _grey_clip(request: MediaRequest) -> InputVideo:
    """Return a clip in the form of the input clips of ``request``."""
    data = GREY * (request.width * request.height * 3 * request.num_video_frames)
    num_frames = request.num_video_frames
    return InputVideo(width=request.width, height=request.height, num_frames=num_frames, fps=request.fps, data=data)


def _grey(request: MediaRequest, mode: Mode = "RGB") -> InputPicture:
    data = GREY * (request.width * request.height * len(mode))
    return InputPicture(width=request.width, height=request.height, mode=mode, data=data)


def warm_encoder(encoder: BlocksEncoder, spec: StageSpec, checkpoint: Checkpoint) -> None:
    """Encode typical requests, under compilation if configured."""
    num_runs = NUM_COMPILED_RUNS if spec.model.text_encoder.compile else 1
    with shared_gpu(spec.stage), encoder.compile_calls():
        for request, pictures in typical_requests(checkpoint.defaults, spec.model.denoiser.warm_sizes):
            for _ in range(num_runs):
                encoder.encode(request, pictures)
        _release_unused(spec)


def warm_decoder(decoder: BlocksDecoder, spec: StageSpec, checkpoint: Checkpoint) -> NDArray[np.uint8]:
    """Decode each of the gang's ``warm_sizes`` and a preview. Return one frame for the warm-up of file encoders.

    A fused decoder of clips decodes three small latent frames. Without ``warm_sizes``, the preview is all else: all
    frames of a clip take a CPU longer than they save.
    """
    defaults, sizes = checkpoint.defaults, spec.model.denoiser.warm_sizes
    with shared_gpu(spec.stage):
        decoder.warm_kernels()
    if not checkpoint.spec.has_known_conditioning:
        logger.info("no warm-up of the decoder: conditioning is unknown", extra={"family": checkpoint.spec.family})
        return np.zeros((1, defaults.height, defaults.width, 3), np.uint8)
    with shared_gpu(spec.stage):
        with decoder.compile_calls():
            for request in map(defaults.request, sizes):
                decoder.decode_all(checkpoint.first_latents(request), request)
        request = defaults.request(sizes[0] if sizes else None)
        frames_FHWC = decoder.preview(checkpoint.first_latents(request), request)[:1]
        _release_unused(spec)
        return frames_FHWC


def _release_unused(spec: StageSpec) -> None:
    """Release unused GPU memory of a model that is to stay within ``memory_gib``."""
    if spec.model.memory_gib is not None:
        release_unused_memory(stage_devices(spec.stage)[0])


@contextmanager
def shared_gpu(stage: StageConfig) -> Iterator[None]:
    """Hold the shared GPU lock, so that GPU work inside does not disturb the timing of a gang."""
    lock = host_lock(stage.num_gpus)
    with lock.shared() if lock is not None else nullcontext():
        yield


def outputs(defaults: Defaults) -> tuple[tuple[MediaRequest, Output], ...]:
    """Return a request and an output for each file format."""
    requests = [defaults.of(kind).request() for kind in defaults.kinds]
    return tuple((request, Output(format=format)) for request in requests for format in FORMATS[request.kind])
