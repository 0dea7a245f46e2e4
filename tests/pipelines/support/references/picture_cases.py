"""Requests with pictures, in the form of our pipelines and of diffusers' own."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from PIL import Image

from pipelines.checkpoint import Checkpoint
from pipelines.request import InputPicture, InputPictures, MediaRequest
from pipelines.run import Pipeline
from pipelines.size import Size
from tests.pipelines.support.checkpoints.tiny_qwen import QwenProcessor
from tests.pipelines.support.references.own_call import own_state

KONTEXT_SIZES = "diffusers.pipelines.flux.pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS"

QWEN_SIZES = "diffusers.modular_pipelines.qwenimage.encoders.calculate_dimensions"


@dataclass(frozen=True, kw_only=True)
class PictureCase:
    """``sides`` are height and width in the model's multiples, ``pictures`` (width, height) of the inputs.

    ``tensor``: the plan splits weights; ``guidance``: a step has two branches. ``own`` are inputs of the pipeline's own
    call that no request has.
    """

    make: Callable[[Path], Path]
    sides: tuple[int, int] = (3, 5)
    pictures: tuple[tuple[int, int], ...] = ((40, 48),)
    has_mask: bool = False
    has_control: bool = False
    tensor: bool = False
    guidance: bool = False
    num_steps: int = 2
    changes: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)

    def strategies(self, num_ranks: int) -> tuple[str, ...]:
        """Return the plan's strategies that the case tests."""
        if num_ranks == 1:
            return ("ulysses",)
        several = ("tensor" if self.tensor else "", "guidance" if self.guidance else "")
        return ("ulysses", "ring", "allgather_kv", *filter(None, several))


def drawn(width: int, height: int, seed: int) -> Image.Image:
    """Return noise in large squares."""
    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(squares, "RGB").resize((width, height), Image.Resampling.NEAREST)


def mask_of(width: int, height: int) -> Image.Image:
    """Return a mask that is white in the left half."""
    mask = Image.new("L", (width, height), 0)
    mask.paste(255, (0, 0, width // 2, height))
    return mask


def images_of(case: PictureCase) -> list[Image.Image]:
    return [drawn(*size, seed=number) for number, size in enumerate(case.pictures)]


def pictures_of(case: PictureCase) -> InputPictures:
    mask = InputPicture.of(mask_of(*case.pictures[0])) if case.has_mask else None
    control = InputPicture.of(drawn(*CONTROL_SIZE, seed=7)) if case.has_control else None
    return InputPictures(pictures=tuple(map(InputPicture.of, images_of(case))), mask=mask, control=control)


CONTROL_SIZE = (80, 48)
"""Size of a control picture, equal to its requests' size, so that none is cropped."""


def request_of(case: PictureCase, folder: Path) -> MediaRequest:
    defaults = Checkpoint(folder).defaults
    height, width = (side * defaults.size_multiple for side in case.sides)
    fixed = {"num_pictures": len(case.pictures), "has_mask": case.has_mask, "has_control": case.has_control, "seed": 5}
    steps = {"num_inference_steps": case.num_steps}
    return defaults.request(
        Size(width=width, height=height), **{"prompt": "a red circle", **steps, **fixed, **case.changes}
    )


def ran(pipeline: Pipeline, checkpoint: Checkpoint, case: PictureCase) -> Mapping[str, Any]:
    """Return the finished latents of all ranks, and the decoder's other inputs."""
    engine, sampler, request = pipeline.engine, pipeline.sampler, request_of(case, checkpoint.path)
    conditioning = pipeline.text_encoder.encode(request, pictures_of(case))
    state = sampler.begin(request, pickle.loads(pickle.dumps(conditioning)))
    assert sampler.num_steps(state) == checkpoint.num_steps(request)
    for _ in range(sampler.num_steps(state)):
        state = sampler.advance(state, engine.predict(sampler.branches(state), tuple(range(dist.get_world_size()))))
    engine.close()
    latents: Mapping[str, Any] = sampler.latents(state)
    return latents


@contextmanager
def small_pictures() -> Iterator[None]:
    """Shrink pictures: some editors bring each to a megapixel, which takes long on a CPU."""
    with ExitStack() as stack:
        stack.enter_context(patch(KONTEXT_SIZES, [(48, 32), (32, 48), (48, 48)]))
        stack.enter_context(patch(QWEN_SIZES, _small_sides))
        stack.enter_context(patch("transformers.Qwen2VLProcessor.from_pretrained", lambda *_, **__: QwenProcessor()))
        yield


def _small_sides(area: int, ratio: float) -> tuple[int, int, None]:
    """Return sides of the model's multiple for a picture that is split into layers."""
    long = 64 if area == 640 * 640 else 48
    return (long, 32, None) if ratio > 1 else (32, long, None)


@cache
def own(case_name: str, make_case: Callable[[str], PictureCase], folder: Path) -> Any:
    """Return the final state of the pipeline's own call."""
    case = make_case(case_name)
    images, request = images_of(case), request_of(case, folder)
    if request.num_layers:
        images = [image.convert("RGBA") for image in images]
    given: dict[str, Any] = {"image": images[0] if len(images) == 1 else images or None}
    if case.has_mask:
        given["mask_image"] = mask_of(*case.pictures[0])
    if request.strength is not None:
        given["strength"] = request.strength
    if case.has_control:
        given |= {"control_image": drawn(*CONTROL_SIZE, seed=7), "control_guidance_end": request.control_guidance_end}
        given["controlnet_conditioning_scale"] = request.control_scale
    with small_pictures():
        given |= {"max_area": request.width * request.height, "layers": request.num_layers}
        return own_state(folder, request, **given, **case.own)
