"""The same clip by diffusers alone, in one process: the latents that go into the decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from pipelines.request import MediaRequest
from tests.pipelines.support.own_call import own_state
from tests.pipelines.support.video import Latents

Images = tuple[Image.Image, ...]


def blocks(folder: Path, request: MediaRequest, images: Images) -> Latents:
    """Of the modular pipeline."""
    named = {"image": images[0]} if images else {}
    return {"latents": own_state(folder, request, **named).get("latents")}


def wan_pipeline(folder: Path, request: MediaRequest, images: Images) -> Latents:
    """Of the classic pipeline: the blocks cut the last frame with width and height exchanged."""
    import diffusers

    first, last = images
    latents: Any = _classic(diffusers.WanImageToVideoPipeline, folder)(
        image=first,
        last_image=last,
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        width=request.width,
        height=request.height,
        num_frames=request.num_frames,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.true_cfg_scale,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="latent",
    ).frames
    return {"latents": latents}


def _classic(pipeline: Any, folder: Path) -> Any:
    classic = pipeline.from_pretrained(folder, dtype=torch.float32)
    classic.set_progress_bar_config(disable=True)
    return classic
