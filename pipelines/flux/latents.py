"""Shapes of FLUX latents: 2x2 patches of the auto-encoder's latent, packed into tokens.

Dims: B batch, C channels of the latent, H and W its height and width, S image tokens, D = 4 C channels of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipelines.flux.geometry import PATCH


def draw_noise(seed: int, num_channels: int, height: int, width: int, dtype: torch.dtype) -> Tensor:
    """``latents_BCHW`` for one picture, drawn on the CPU so that every rank and device draws the same.

    Drawn in float32 and rounded, as torch 2.13 does by itself; older releases draw other numbers in half precisions.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, num_channels, height, width), generator=generator).to(dtype)


def pack(latents_BCHW: Tensor) -> Tensor:
    """Tokens ``latents_BSD`` in row-major order; a token lists its channels, each with its 2x2 values."""
    batch, channels, height, width = latents_BCHW.shape
    patches = latents_BCHW.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH * PATCH)


def unpack(latents_BSD: Tensor, height: int, width: int) -> Tensor:
    """The inverse of ``pack``; ``height`` and ``width`` are those of the latent."""
    batch, _, channels = latents_BSD.shape
    tokens = latents_BSD.view(batch, height // PATCH, width // PATCH, channels // PATCH**2, PATCH, PATCH)
    return tokens.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // PATCH**2, height, width)


def image_ids(height: int, width: int) -> Tensor:
    """Positions ``ids_S3`` (0, row, column) of the tokens of a latent; float32, exact in every dtype's stead."""
    rows, columns = torch.meshgrid(torch.arange(height // PATCH), torch.arange(width // PATCH), indexing="ij")
    return torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).reshape(-1, 3).float()


def text_ids(num_tokens: int) -> Tensor:
    """Positions ``ids_T3`` of text tokens: all at the origin."""
    return torch.zeros(num_tokens, 3)
