"""Small auto-encoders of pictures and of clips, and a measure of pixels' similarity."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
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

PUBLISHED = Path(__file__).parents[4] / "pipelines" / "published"


def published_in_small(model: str, division: int, **changes: Any) -> Any:
    """Return a published model's auto-encoder of clips with random weights and widths divided by ``division``."""
    config: dict[str, Any] = json.loads((PUBLISHED / model / "vae" / "config.json").read_text())
    for key, value in config.items():
        if key.endswith("block_out_channels"):
            config[key] = [width // division for width in value]
    config |= {"latent_channels": 8, **changes}
    torch.manual_seed(0)
    vae = getattr(diffusers, config["_class_name"]).from_config(config)
    return shake(vae).requires_grad_(False)


CAUSAL = {"decoder_causal": True, "decoder_block_out_channels": (16, 32, 64), "upsample_factor": (1, 1, 1)}
"""No frame depends on a later one, and blocks have fewer channels than the one before them."""
WHOLE_CLIPS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "reflected": lambda: published_in_small("LTX-2", 16),
        "causal": lambda: published_in_small("LTX-2", 16, **CAUSAL),
        "zeros": lambda: published_in_small("LTX-2.3", 32),
        "shortcuts": lambda: published_in_small("LTX-Video", 16),
        "frame by frame": lambda: published_in_small("HunyuanVideo-1.5-480p_t2v", 32),
    }
)
"""All published structures of decoders that the library runs on all frames at once, small."""

EXACT_DB = 100.0


def decibels(one: Tensor, other: Tensor) -> float:
    """Return the PSNR of pixels in [-1, 1]."""
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


def decoded(vae: Any, latents_BCFHW: Tensor) -> Tensor:
    pixels: Tensor = vae.decode(latents_BCFHW, return_dict=False)[0]
    return pixels


def error(pixels: Tensor, expected: Tensor) -> float:
    return float((pixels.double() - expected.double()).norm() / expected.double().norm())
