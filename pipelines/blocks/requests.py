"""Convert a request to the inputs of a pipeline's blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from PIL.Image import Image

from pipelines.pictures import NO_PICTURES, InputPicture, InputPictures
from pipelines.request import MediaRequest

FRAME_RATES = ("frame_rate", "fps")
LAST = "last_image"
PICTURES = ("image", LAST)


def inputs_of(request: MediaRequest, known: Collection[str], pictures: InputPictures = NO_PICTURES) -> dict[str, Any]:
    """Return the inputs among ``known`` that ``request`` sets; ``pictures`` are given to the encoder only."""
    mask = None if pictures.mask is None else pictures.mask.image()
    inputs: dict[str, Any] = {
        "prompt": request.prompt,
        "height": request.height,
        "width": request.width,
        "max_area": request.width * request.height,
        "num_frames": request.num_frames,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "strength": request.strength,
        "layers": request.num_layers or None,
        "generator": torch.Generator().manual_seed(request.seed),
        "output_type": "pt",
        "use_kv_cache": False,  # stand-ins for the transformer have none
        **dict.fromkeys(FRAME_RATES, request.fps),
        **_picture_inputs([_image(picture, request) for picture in pictures.pictures], mask, known),
    }
    if request.true_cfg_scale > 1:
        inputs["negative_prompt"] = request.negative_prompt
    return {name: value for name, value in inputs.items() if name in known and value is not None}


def _image(picture: InputPicture, request: MediaRequest) -> Image:
    """Return the picture with opacity if it is split into layers: other auto-encoders have no such channel."""
    return picture.image() if request.num_layers else picture.on_white()


def _picture_inputs(images: list[Image], mask: Image | None, known: Collection[str]) -> Mapping[str, Any]:
    """Return several pictures as one list, or as a clip's first and last frame."""
    if not images:
        return {}
    if LAST in known and len(images) == 2:
        return {"image": images[0], LAST: images[1], "mask_image": mask}
    return {"image": images[0] if len(images) == 1 else images, "mask_image": mask}
