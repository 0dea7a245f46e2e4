"""The trained models, and their inputs at the first step of a real prompt."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engines.core.model import Branch, DenoiserModel
from engines.parallel.local_attention import plain_attention
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest

CPU = torch.device("cpu")
NAMES = ("flux-shapes", "wan-shapes")
PROMPTS = {"image": "a large red circle in the centre", "video": "a red circle moves from left to right"}
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "default": {"flux-shapes": {}, "wan-shapes": {}},
    "wide": {"flux-shapes": {}, "wan-shapes": {"num_frames": 13}},
    "narrow": {"flux-shapes": {"width": 64}, "wan-shapes": {"width": 64, "num_frames": 9}},
}
"""The last two have tokens that divide by eight: four ranks get equal shares, and a hybrid's halves are equal."""


def request_for(name: str, **changes: Any) -> MediaRequest:
    """Return the model's default request, unguided."""
    defaults = Checkpoint.open(name).defaults
    unguided: dict[str, Any] = {"model": name, "prompt": PROMPTS[defaults.kind], "true_cfg_scale": 1.0, "seed": 11}
    return defaults.request(**(unguided | changes))


@functools.cache
def first_branch(name: str, dtype: torch.dtype, size: str = "default") -> Branch:
    checkpoint, request = Checkpoint.open(name, dtype=dtype), request_for(name, **SIZES[size][name])
    sampler, conditioning = checkpoint.sampler(), checkpoint.text_encoder().encode(request)
    return sampler.branches(sampler.begin(request, conditioning))[0]


def twice(branch: Branch) -> Branch:
    """Return a batch of two."""
    inputs = {name: torch.cat((x, x)) if x.shape[0] == 1 else x for name, x in branch.inputs.items()}
    return replace(branch, inputs=inputs)


@functools.cache
def load(name: str, dtype: torch.dtype) -> DenoiserModel:
    return Checkpoint.open(name, dtype=dtype).denoiser()


@torch.no_grad()
def predicted(name: str, branch: Branch) -> Tensor:
    """Return the prediction of the unsharded model in float32 with attention written out."""
    model = load(name, torch.float32)
    module = model.modules[branch.module]
    model.set_kernel(module, plain_attention)
    return model.forward(module, branch.inputs)
