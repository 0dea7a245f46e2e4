"""Results of diffusers' modular pipeline when it is called as a whole, in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pipelines.directory import open_modular
from pipelines.request import MediaRequest

Change = Callable[[Any], None]
"""Changes a pipeline of diffusers before the call."""


def as_it_is(pipeline: Any) -> None:
    """Change nothing."""


@cache
def own_latents(folder: Path, request: MediaRequest) -> Tensor:
    """Return the finished latents, the decoder's input."""
    latents: Tensor = own_state(folder, request).get("latents")
    return latents


def own_state(folder: Path, request: MediaRequest, *, change: Change = as_it_is, **more: Any) -> Any:
    """Return the final state. ``more`` are inputs besides those of the request: pictures."""
    pipeline = open_modular(folder)
    pipeline.load_components(dtype=torch.float32)
    change(pipeline)
    known = {spec.name: spec.default for spec in pipeline.blocks.inputs}
    for name in ("guider", "guider_2"):
        if (guider := getattr(pipeline, name, None)) is not None:
            scale = request.true_cfg_scale - guider.use_original_formulation
            scaled = guider.new(guidance_scale=scale, enabled=request.true_cfg_scale > 1)
            pipeline.update_components(**{name: scaled})
    for block in pipeline.blocks.sub_blocks.values():
        silence(block)
    inputs = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "height": request.height,
        "width": request.width,
        "num_frames": request.num_frames,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "sigmas": request.solver.sigmas or None,
        "max_sequence_length": longest_prompt(pipeline, known.get("max_sequence_length")),
        "generator": torch.Generator().manual_seed(request.seed),
        "output_type": "pt",
        **more,
    }
    with uncompiled_masks():
        return pipeline(**{name: value for name, value in inputs.items() if name in known and value is not None})


@contextmanager
def uncompiled_masks() -> Iterator[None]:
    """Make masks of Wan Animate 2's class, if it is loaded, without compiling them.

    A compilation takes ten seconds a process, and gives the same values.
    """
    module: Any = sys.modules.get("diffusers.models.transformers.transformer_wan_animate_2")
    if module is None:
        yield
        return
    make = module.create_block_mask
    with patch.object(module, "create_block_mask", lambda *args, **call: make(*args, **{**call, "_compile": False})):
        yield


def longest_prompt(pipeline: Any, usual: int | None) -> int | None:
    """Return the usual number of tokens, or the limit of the folder's tokenizers: tiny ones have fewer, and some
    encoders pad prompts to it."""
    parts = (getattr(pipeline, name, None) for name in ("tokenizer", "tokenizer_2", "tokenizer_3", "processor"))
    limits = [getattr(one, "tokenizer", one).model_max_length for one in parts if one is not None]
    return min(usual, max(limits)) if usual is not None and limits else None


def silence(block: Any) -> None:
    for inner in block.sub_blocks.values():
        silence(inner)
    if hasattr(block, "set_progress_bar_config"):
        block.set_progress_bar_config(disable=True)
