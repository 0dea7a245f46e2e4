"""What a decode takes of a GPU at the very least, so that a picture that certainly does not fit is refused before it is
painted."""

from __future__ import annotations

from typing import Any

import torch

from pipelines.vae.known import is_known
from pipelines.vae.strips import largest_bytes

CERTAIN_COPIES = 2
"""A layer's input and its result are held at once; ``rows.NUM_HELD`` are what a usual decode takes."""


def needed_bytes(vae: Any, width: int, height: int) -> int:
    """The weights, and the largest activation of a picture of so many pixels. Never more than it is; of auto-encoders
    that ``rows`` does not know, such as those of clips, the weights alone."""
    weight_bytes = sum(int(weight.nbytes) for weight in vae.parameters())
    if not is_known(getattr(vae, "decoder", None)):
        return weight_bytes
    scale = 2 ** sum(bool(block.upsamplers) for block in vae.decoder.up_blocks)
    latents_BCHW = torch.empty(1, 1, height // scale, width // scale, dtype=vae.dtype, device="meta")
    return int(weight_bytes + CERTAIN_COPIES * largest_bytes(vae.decoder, latents_BCHW))


def check_fits(vae: Any, width: int, height: int, available_bytes: int) -> None:
    """``ValueError`` for a picture that cannot be decoded in ``available_bytes``, with what it needs."""
    needed = needed_bytes(vae, width, height)
    if needed > available_bytes:
        raise ValueError(
            f"to decode {width}x{height} pixels takes {needed / 2**30:.1f} GiB at least, and the decoder's GPU has "
            f"{available_bytes / 2**30:.1f} GiB: ask for a smaller size, or serve the model with decoder.memory_gib, "
            "with which large pictures are decoded in strips"
        )
