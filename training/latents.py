"""Shapes of FLUX latents: 2x2 patches of the auto-encoder's latent, packed into tokens.

Dims: B batch, C channels of the latent, H and W its height and width, S image tokens, D = 4 C channels of a token.
"""

from __future__ import annotations

from torch import Tensor

from pipelines.models.flux.spec import PATCH


def pack(latents_BCHW: Tensor) -> Tensor:
    """Return tokens ``latents_BSD`` in row-major order; a token lists its channels, each with its 2x2 values."""
    batch, channels, height, width = latents_BCHW.shape
    patches = latents_BCHW.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH * PATCH)


def unpack(latents_BSD: Tensor, height: int, width: int) -> Tensor:
    """Return latents ``latents_BCHW`` from tokens of `pack`; ``height`` and ``width`` are the latents'."""
    batch, _, channels = latents_BSD.shape
    patches = latents_BSD.view(batch, height // PATCH, width // PATCH, channels // PATCH**2, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, height, width)
