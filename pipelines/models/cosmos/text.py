"""A call of Cosmos 3's transformer as few values, of which all but two are the same in every step of a job.

What diffusers' blocks pass beside them (places in the packed sequence, timesteps token by token) follows from these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipelines.models.architecture import Config
from pipelines.models.predictions import blank_like

if TYPE_CHECKING:
    from torch import Tensor

LATENTS, TIMESTEP = "hidden_states", "timestep"
TEXT_IDS, POSITIONS, NOISY_FRAMES = "input_ids", "position_ids", "noisy_frames"
CLIP_SHAPE, SOUND_SHAPE = "clip_shape", "sound_shape"
"""Constants: the latents' channels, frames, rows and columns; the sound's channels and latents."""


def adapted(config: Config, call: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
    """Clip and sound in one tensor, ``latents_1N``; ``noisy_frames_F`` are the latent frames that are not given.

    What no step changes is passed on as it came, so that engines know it again.
    """
    import torch

    latents = latents_of(call)
    shapes = zip((CLIP_SHAPE, SOUND_SHAPE), (tuple(x.shape[-4:]) for x in latents), strict=False)
    return {
        LATENTS: torch.cat([x.flatten() for x in latents])[None],
        TIMESTEP: call["vision_timesteps"][:1],
        TEXT_IDS: call["input_ids"],
        POSITIONS: call["position_ids"],
        NOISY_FRAMES: call["vision_noisy_frame_indexes"][0],
        **dict(shapes),
    }


def latents_of(call: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """``clip_1CTHW`` of diffusers' call, and ``sound_CT`` where there is one."""
    return (*call["vision_tokens"], *(call.get("sound_tokens") or ()))


def blank(config: Config, call: Mapping[str, Any]) -> tuple[Any, ...]:
    return _as_output([blank_like(x) for x in latents_of(call)])


def answer(config: Config, call: Mapping[str, Any], prediction: Tensor) -> tuple[Any, ...]:
    import torch

    latents = latents_of(call)
    parts = torch.split(prediction[0], [x.numel() for x in latents])
    return _as_output([part.reshape(x.shape) for part, x in zip(parts, latents, strict=True)])


def _as_output(velocities: list[Tensor]) -> tuple[Any, ...]:
    """Lists of velocities of clips, sounds and actions."""
    return velocities[:1], velocities[1:] or None, None


def grid(config: Config, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """Patches of (frames, rows, columns); at the edges some are filled up."""
    _, frames, *sides = arguments[CLIP_SHAPE]
    rows, columns = (math.ceil(side / config["latent_patch_size"]) for side in sides)
    return frames, rows, columns


def num_sound_tokens(arguments: Mapping[str, Any]) -> int:
    return int(arguments.get(SOUND_SHAPE, (0, 0))[1])
