"""A call of Cosmos 3's transformer as few values, of which all but two are the same in every step of a job.

What diffusers' blocks pass beside them (places in the packed sequence, timesteps token by token) follows from these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipelines.models.spec import Config

if TYPE_CHECKING:
    from torch import Tensor

LATENTS, TIMESTEP = "hidden_states", "timestep"
TEXT_IDS, POSITIONS, NOISY_FRAMES = "input_ids", "position_ids", "noisy_frames"
CLIP_SHAPE, SOUND_SHAPE = "clip_shape", "sound_shape"
"""Constants: the latents' channels, frames, rows and columns; the sound's channels and latents."""


def latents_of(call: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """``clip_1CTHW`` of diffusers' call, and ``sound_CT`` where there is one."""
    return (*call["vision_tokens"], *(call.get("sound_tokens") or ()))


def as_output(velocities: list[Tensor]) -> tuple[Any, ...]:
    """Lists of velocities of clips, sounds and actions."""
    return velocities[:1], velocities[1:] or None, None


def grid(config: Config, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """Patches of (frames, rows, columns); at the edges some are filled up."""
    _, frames, *sides = arguments[CLIP_SHAPE]
    rows, columns = (math.ceil(side / config["latent_patch_size"]) for side in sides)
    return frames, rows, columns


def num_sound_tokens(arguments: Mapping[str, Any]) -> int:
    return int(arguments.get(SOUND_SHAPE, (0, 0))[1])
