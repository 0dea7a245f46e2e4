"""Small auto-encoders of pictures and of clips, and how alike pixels are."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from tests.pipelines.support.checkpoints import tiny
from tests.pipelines.support.checkpoints.parts import shake

LATENTS = {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
SIZES = {"base_dim": 8, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1, **LATENTS}
RESIDUAL = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}

VAES: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "wan 2.1": tiny.wan_vae,
        "wan 2.2": lambda: shake(diffusers.AutoencoderKLWan(**SIZES, **RESIDUAL)),
        "qwen image": lambda: shake(diffusers.AutoencoderKLQwenImage(**SIZES)),
    }
)

EXACT_DB = 100.0


def decibels(one: Tensor, other: Tensor) -> float:
    """Of pixels in [-1, 1]."""
    return 10 * math.log10(4 / max((one.double() - other.double()).square().mean().item(), 1e-30))


def tiny_vae(**options: Any) -> AutoencoderKL:
    torch.manual_seed(0)
    levels = 3
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(8, 16, 32),
        norm_num_groups=4,
        **{"latent_channels": 4, "sample_size": 32, **options},
    )
    return vae.eval().requires_grad_(False)


def copies(decoder: Any, count: int) -> list[Any]:
    return [decoder, *(copy.deepcopy(decoder) for _ in range(1, count))]
