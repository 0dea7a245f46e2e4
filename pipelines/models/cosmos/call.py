"""The call of Cosmos 3's transformer as few inputs, of which steps change only two. Free of torch.

The other arguments of diffusers' transformer (packed places, timesteps by token) follow from these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from pipelines.models.spec import Config


LATENTS, TIMESTEP = "hidden_states", "timestep"
TEXT_IDS, POSITIONS, NOISY_FRAMES = "input_ids", "position_ids", "noisy_frames"
CLIP_SHAPE, SOUND_SHAPE = "clip_shape", "sound_shape"
"""Constants: the latents' channels, frames, rows and columns; the sound's channels and latents."""


def latents_of(call: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return ``clip_1CTHW`` of diffusers' call, and ``sound_CT`` if it has any."""
    return (*call["vision_tokens"], *(call.get("sound_tokens") or ()))


def as_output(velocities: list[Tensor]) -> tuple[Any, ...]:
    """Return lists of velocities of clips, sounds and actions."""
    return velocities[:1], velocities[1:] or None, None


def grid(config: Config, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the patches of (frames, rows, columns), padded at the edges."""
    _, frames, *sides = arguments[CLIP_SHAPE]
    rows, columns = (math.ceil(side / config["latent_patch_size"]) for side in sides)
    return frames, rows, columns


def num_sound_tokens(arguments: Mapping[str, Any]) -> int:
    return int(arguments.get(SOUND_SHAPE, (0, 0))[1])
