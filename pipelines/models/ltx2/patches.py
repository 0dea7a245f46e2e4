"""Patches of diffusers' blocks of LTX-2."""

from __future__ import annotations

from typing import Any

from diffusers.modular_pipelines.ltx2.denoise import LTX2ConditionLoopBeforeDenoiser, LTX2Image2VideoLoopBeforeDenoiser

from pipelines.blocks.tree import replace_blocks
from pipelines.models.device_timestep import TimestepOnDevice


class LTX2PictureLoopBeforeDenoiser(TimestepOnDevice, LTX2Image2VideoLoopBeforeDenoiser):  # type: ignore[misc]
    """Makes a timestep a token of a clip that begins with a picture."""


class LTX2KeyframeLoopBeforeDenoiser(TimestepOnDevice, LTX2ConditionLoopBeforeDenoiser):  # type: ignore[misc]
    """Makes a timestep a token of a clip with frames that are given."""


def patch_blocks(blocks: Any) -> None:
    replace_blocks(blocks, LTX2Image2VideoLoopBeforeDenoiser, LTX2PictureLoopBeforeDenoiser)
    replace_blocks(blocks, LTX2ConditionLoopBeforeDenoiser, LTX2KeyframeLoopBeforeDenoiser)
