"""Small models of both families with shaken weights, and inputs of even and uneven lengths. Equal in every process."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from engines.core.model import Branch, DenoiserModel
from tests.support.flux_denoiser import image_ids

EVEN = {"flux": (16, 8, 12), "wan": (2, 8, 8)}
"""FLUX: text tokens, latent height and width; Wan: frames, latent height and width (patches of 1x2x2)."""
UNEVEN = {"flux": (13, 6, 14), "wan": (3, 6, 10)}
SIZES = {"even": EVEN, "uneven": UNEVEN}


def shake(module: torch.nn.Module, seed: int = 3) -> Any:
    """Replace fresh weights, which are too small or zero in places, so that faults in attention and norms show."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            scaled = noise * (1.2 / parameter[0].numel() ** 0.5)
        elif "norm" in name and name.endswith("weight"):
            scaled = 1 + 0.2 * noise
        else:
            scaled = 0.1 * noise
        parameter.data.copy_(scaled * 2 if "norm_q" in name or "norm_k" in name else scaled)
    return module.eval().requires_grad_(False)


@cache
def model(family: str) -> DenoiserModel:
    """Return the family's transformer with its shard plan and its attention processors."""
    from tests.support.flux_denoiser import as_denoiser as flux_denoiser
    from tests.support.wan_denoiser import as_denoiser as wan_denoiser

    module = transformer(family)
    return flux_denoiser(module) if family == "flux" else wan_denoiser({"transformer": module})


def transformer(family: str) -> Any:
    """Return diffusers' module with its own attention processors."""
    return {"flux": flux, "wan": _wan}[family]()


def flux(num_heads: int = 8, num_blocks: int = 2) -> Any:
    """Return a FLUX transformer with ``num_blocks`` of each kind."""
    from diffusers import FluxTransformer2DModel

    depth = {"num_layers": num_blocks, "num_single_layers": num_blocks}
    heads = {"num_attention_heads": num_heads, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6)}
    sizes = {"in_channels": 16, "joint_attention_dim": 48, "pooled_projection_dim": 32, "guidance_embeds": True}
    return shake(FluxTransformer2DModel(**depth, **heads, **sizes))


def _wan() -> Any:
    from diffusers import WanTransformer3DModel

    sizes = {"num_attention_heads": 8, "attention_head_dim": 12, "ffn_dim": 192, "num_layers": 4, "text_dim": 48}
    channels = {"in_channels": 4, "out_channels": 4, "freq_dim": 32}
    return shake(WanTransformer3DModel(**sizes, **channels, rope_max_seq_len=64))


def branches(family: str, length: str, num: int = 1, seed: int = 5) -> tuple[Branch, ...]:
    """Return ``num`` forwards of one step that differ in their text (and in FLUX in its length)."""
    generator = torch.Generator().manual_seed(seed)
    make = {"flux": _flux_inputs, "wan": _wan_inputs}[family]
    latents: dict[str, Tensor] = {}
    return tuple(Branch(inputs=make(SIZES[length][family], generator, latents, number)) for number in range(num))


def _flux_inputs(
    size: tuple[int, int, int], generator: torch.Generator, latents: dict[str, Tensor], number: int
) -> dict[str, Tensor]:
    text, height, width = size[0] - number, size[1], size[2]
    latents.setdefault("latents", torch.randn(2, height * width // 4, 16, generator=generator))
    return {
        "hidden_states": latents["latents"],
        "encoder_hidden_states": torch.randn(2, text, 48, generator=generator),
        "pooled_projections": torch.randn(2, 32, generator=generator),
        "timestep": torch.full((2,), 0.7),
        "guidance": torch.full((2,), 3.5),
        "img_ids": image_ids(height, width),
        "txt_ids": torch.zeros(text, 3),
    }


def _wan_inputs(
    size: tuple[int, int, int], generator: torch.Generator, latents: dict[str, Tensor], number: int
) -> dict[str, Tensor]:
    latents.setdefault("latents", torch.randn(2, 4, *size, generator=generator))
    text = torch.randn(2, 11, 48, generator=generator)
    return {"hidden_states": latents["latents"], "timestep": torch.full((2,), 700.0), "encoder_hidden_states": text}
