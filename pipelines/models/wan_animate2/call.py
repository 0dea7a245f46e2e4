"""The names of what the transformer of Wan Animate 2 takes. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LATENTS, TIMESTEP, TEXT, PICTURE = "hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image"
CONDITION = "condition_latents"
"""Known part of the clip: the picture in its first latent frame, ``(B, mask and latents, F, H, W)``."""
DRIVING, DRIVING_TEXT, DRIVING_PICTURE = "driving_hidden_states", "driving_text", "driving_picture"
"""The driving clip as the transformer sees it, ``(B, C, F - 1, H, W)``, with its own prompt and first frame."""
DRIVING_VIDEO, REFERENCE, FINISHED = "driving_video_latents", "reference_latents", "finished_segments"
"""Values of the blocks.

The driving clip is ``(segments, C, F, H, W)``; the frames that a segment continues ``(C, F + 1, H, W)``, after the
picture's. The last is a list of the latents of the segments before it.
"""
NEGATIVE = "is_uncondtion"
"""True if the call is that of the negative prompt, which leaves out a block. Diffusers' spelling."""
SKIPPED_BLOCK = 9


def num_latent_frames(num_frames: int, factor: int) -> int:
    """Return the latent frames of a clip of ``num_frames``; each but the first is of ``factor`` frames."""
    return 1 + -(-(num_frames - 1) // factor)


def grid(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the patches of (frames, rows, columns) of the result, the picture's frame included."""
    frames, height, width = arguments[LATENTS].shape[-3:]
    _, rows, columns = config["patch_size"]
    return frames, height // rows, width // columns


def num_tokens(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
    return math.prod(grid(config, arguments))
