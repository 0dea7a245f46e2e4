"""FLUX.1-dev at full size with random weights, its inputs, and the arithmetic of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.models.making import default_dtype, draw_vectors

GUIDANCE = 4.0
"""Exact in bfloat16 times 1000: otherwise bfloat16 answers would be those of another guidance."""
DUAL_BLOCKS, SINGLE_BLOCKS, CHANNELS, TEXT_TOKENS = 19, 38, 3072, 512
SMALL = {
    "num_layers": 2,
    "num_single_layers": 4,
    "num_attention_heads": 8,
    "attention_head_dim": 32,
    "axes_dims_rope": (8, 12, 12),
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
}
"""Configuration for a CPU: the program's own test."""
ARCHITECTURE = (*SMALL, "in_channels", "guidance_embeds")
"""Settings that make one such module unlike another."""


def build(device: torch.device, dtype: torch.dtype, *, small: bool = False) -> Any:
    """Return a ``FluxTransformer2DModel``, equal on all ranks, with norms and biases away from 1 and 0."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    with torch.device(device):
        with default_dtype(dtype):
            module = FluxTransformer2DModel(guidance_embeds=True, **(SMALL if small else {}))
        draw_vectors(module)
    return module.eval().requires_grad_(False)


def architecture(module: Any) -> dict[str, Any]:
    """Return the settings that other projects' transformers take under the same names."""
    return {name: module.config[name] for name in ARCHITECTURE}


def image_ids(side: int) -> Tensor:
    """Return positions (0, row, column) of ``side`` x ``side`` tokens; float32, for every dtype."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).reshape(-1, 3).float()


def inputs(module: Any, side: int, *, batch: int = 1, text: int = TEXT_TOKENS) -> dict[str, Tensor]:
    """Return one step's inputs for a picture of ``side`` x ``side`` pixels, equal on all ranks."""
    parameter = next(module.parameters())
    device, dtype = parameter.device, parameter.dtype
    generator = torch.Generator(device).manual_seed(1)
    grid = side // 16

    def randn(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, device=device, dtype=dtype, generator=generator)

    return {
        "hidden_states": randn(grid * grid, module.config.in_channels),
        "encoder_hidden_states": randn(text, module.config.joint_attention_dim),
        "pooled_projections": randn(module.config.pooled_projection_dim),
        "timestep": torch.full((batch,), 0.5, device=device, dtype=dtype),
        "guidance": torch.full((batch,), GUIDANCE, device=device),
        "img_ids": image_ids(grid).to(device),
        "txt_ids": torch.zeros(text, 3, device=device),
    }


def flop(side: int, *, batch: int = 1) -> tuple[float, float]:
    """Return floating-point operations of one step: matrix products of the blocks, and attention."""
    tokens = (side // 16) ** 2 + TEXT_TOKENS
    blocks = DUAL_BLOCKS + SINGLE_BLOCKS
    products = 2 * tokens * 12 * CHANNELS**2 * blocks
    attention = 4 * tokens**2 * CHANNELS * blocks
    return float(batch * products), float(batch * attention)
