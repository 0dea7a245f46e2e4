"""Wan2.1-14B at full size with random weights, run by the engine: compiled blocks, one graph a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.making import default_dtype
from benchmarks.models.wan_denoiser import as_denoiser
from engines.core.model import Branch
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.options import TorchOptions

LAYERS, CHANNELS, FFN, TEXT_TOKENS = 40, 5120, 13824, 512
FRAMES = 81
WIDTH_OF_HEIGHT = {480: 832, 720: 1280}
SMALL = {"num_attention_heads": 4, "attention_head_dim": 32, "ffn_dim": 256, "text_dim": 64}
SMALL_LAYERS, SMALL_LATENT, SMALL_TEXT = 2, (3, 6, 10), 16
"""For a CPU: the program's own test."""


def latent_size(height: int) -> tuple[int, int, int]:
    """Frames, height and width of the latent: a quarter of the frames, an eighth of the pixels."""
    return (FRAMES - 1) // 4 + 1, height // 8, WIDTH_OF_HEIGHT[height] // 8


def num_tokens(height: int) -> int:
    frames, rows, columns = latent_size(height)
    return frames * (rows // 2) * (columns // 2)


def flop(height: int, num_blocks: int = LAYERS) -> tuple[float, float]:
    """Of one forward: matrix products, attention (to itself and to the text)."""
    tokens = num_tokens(height)
    weights = 6 * CHANNELS**2 + 2 * CHANNELS * FFN
    products = 2 * num_blocks * (tokens * weights + TEXT_TOKENS * 2 * CHANNELS**2)
    attention = 4 * num_blocks * CHANNELS * (tokens**2 + tokens * TEXT_TOKENS)
    return float(products), float(attention)


@cache
def build(device: torch.device, num_blocks: int, small: bool) -> Any:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    sizes = SMALL if small else {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": FFN}
    with torch.device(device), default_dtype(torch.float32 if small else torch.bfloat16):
        module = WanTransformer3DModel(num_layers=min(num_blocks, SMALL_LAYERS) if small else num_blocks, **sizes)
    return module.eval().requires_grad_(False)


@cache
def engine(
    device: torch.device, strategy: str, capture: bool, num_blocks: int, small: bool, peer_memory: bool
) -> TorchEngine:
    module = build(device, num_blocks, small)
    for block in module.blocks:
        block.__dict__.pop("forward", None)  # another engine's compiled one
    model = as_denoiser({"transformer": module})
    options = TorchOptions(peer_memory=peer_memory)
    return TorchEngine(model, strategy=strategy, capture=capture, options=options)


def step(
    device: torch.device,
    *,
    height: int,
    ranks: tuple[int, ...],
    strategy: str,
    num_branches: int,
    capture: bool,
    num_blocks: int,
    small: bool,
    peer_memory: bool,
) -> Callable[[], tuple[Tensor, ...]]:
    """One step of a clip of 81 frames; two branches as with true guidance."""
    generator = torch.Generator(device).manual_seed(1)
    ready = engine(device, strategy, capture, num_blocks, small, peer_memory)
    latent = SMALL_LATENT if small else latent_size(height)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=ready.dtype, generator=generator)

    latents = randn(1, 16, *latent)
    text = (SMALL_TEXT, SMALL["text_dim"]) if small else (TEXT_TOKENS, 4096)
    timestep = torch.full((1,), 700.0, device=device)
    branches = tuple(
        Branch(
            inputs={"hidden_states": latents, "timestep": timestep, "encoder_hidden_states": randn(1, *text)},
        )
        for _ in range(num_branches)
    )
    ready.warm_up(branches, ranks)
    return lambda: ready.predict(branches, ranks)
