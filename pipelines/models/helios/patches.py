"""Noise as diffusers' blocks for chunks of a clip should draw it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.modular_pipelines.helios import denoise
from diffusers.modular_pipelines.helios.before_denoise import HeliosAddNoiseToImageLatentsStep
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from torch import Tensor

from pipelines.blocks.tree import replace_blocks

NOISED = ("image_latents", "fake_image_latents")
JITTER = 1e-8


class NoiseOnCpu(HeliosAddNoiseToImageLatentsStep):  # type: ignore[misc]  # diffusers has no types
    """Takes the place of a block that draws on the device, from a generator that is on the CPU."""

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        device = components._execution_device
        for name in NOISED:
            state.set(name, state.get(name).cpu())
        super().__call__(SimpleNamespace(_execution_device=torch.device("cpu")), state)
        for name in NOISED:
            state.set(name, state.get(name).to(device))
        return components, state


def block_noise_BCFHW(
    batch: int,
    channels: int,
    frames: int,
    height: int,
    width: int,
    gamma: float,
    patch_size: tuple[int, int, int],
    device: torch.device,
    generator: torch.Generator,
) -> Tensor:
    """Noise of which the values of a patch have a covariance of ``-gamma`` with each other.

    For the published ``gamma`` the matrix is singular but for a hundred-millionth, which float32 does not see:
    diffusers factorises it in that, and may fail.
    """
    _, rows, columns = patch_size
    covariance = torch.eye(rows * columns, dtype=torch.float64) * (1 + gamma + JITTER) - gamma
    factor = torch.linalg.cholesky(covariance).float()
    grid = (batch, channels, frames, height // rows, width // columns)
    drawn = torch.randn(*grid, rows * columns, generator=generator, device=generator.device)
    noise: Tensor = torch.unflatten(drawn @ factor.T.to(drawn.device), -1, (rows, columns))
    return noise.permute(0, 1, 2, 3, 5, 4, 6).reshape(batch, channels, frames, height, width).to(device)


def patch_blocks(blocks: Any) -> None:
    """Blocks that loop over steps themselves also show a bar for each chunk, which nobody can turn off."""
    replace_blocks(blocks, HeliosAddNoiseToImageLatentsStep, NoiseOnCpu)
    denoise.sample_block_noise = block_noise_BCFHW
    denoise.tqdm = partial(denoise.tqdm, disable=True)
