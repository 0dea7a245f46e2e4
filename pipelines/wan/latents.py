"""Shapes of Wan latents ``latents_BCFHW``: batch, channels, latent frames, height and width of the latent."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_noise(seed: int, num_channels: int, size: tuple[int, int, int]) -> Tensor:
    """``latents_BCFHW`` for one clip, float32, drawn on the CPU so that every rank and device draws the same."""
    return torch.randn((1, num_channels, *size), generator=torch.Generator().manual_seed(seed))
