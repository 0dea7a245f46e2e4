"""Patches of diffusers' blocks of LTX-Video."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines.ltx.denoise import LTXImage2VideoLoopBeforeDenoiser

from pipelines.blocks.tree import replace_blocks
from pipelines.models.device_timestep import TimestepOnDevice


class LTXPictureLoopBeforeDenoiser(TimestepOnDevice, LTXImage2VideoLoopBeforeDenoiser):  # type: ignore[misc]
    """Makes a timestep a token."""


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, LTXImage2VideoLoopBeforeDenoiser, LTXPictureLoopBeforeDenoiser)
