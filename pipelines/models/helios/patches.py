"""Patches of the noise in diffusers' blocks for chunks of a clip, and of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.transformers.transformer_helios import HeliosAttnProcessor
from diffusers.modular_pipelines.helios import denoise
from diffusers.modular_pipelines.helios.before_denoise import (
    HeliosAddNoiseToImageLatentsStep,
    HeliosAddNoiseToVideoLatentsStep,
)
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from torch import Tensor, nn

from engines.core.model import ModelInputs
from engines.fast.records import RotaryTables
from pipelines.blocks import attention
from pipelines.blocks.tree import replace_blocks
from pipelines.models.text_keys import KEYS_VALUES, TEXT, forward_with_keys, stacked_keys_values, with_keys

NOISY_LATENTS = ("image_latents", "fake_image_latents")
NOISY_CLIP = ("image_latents", "video_latents")
JITTER = 1e-8


class NoiseOnCpu(HeliosAddNoiseToImageLatentsStep):  # type: ignore[misc]  # diffusers has no types
    """Replaces a block that draws on the device from a generator on the CPU."""

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        _call_on_cpu(super().__call__, NOISY_LATENTS, components, state)
        return components, state


class ClipNoiseOnCpu(HeliosAddNoiseToVideoLatentsStep):  # type: ignore[misc]  # diffusers has no types
    """``NoiseOnCpu`` for an input clip."""

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        _call_on_cpu(super().__call__, NOISY_CLIP, components, state)
        return components, state


def _call_on_cpu(block: Callable[..., Any], names: tuple[str, ...], components: Any, state: PipelineState) -> None:
    """Call ``block`` with the latents ``names`` on the CPU, and move what it makes of them to the device."""
    device = components._execution_device
    for name in names:
        state.set(name, state.get(name).cpu())
    block(SimpleNamespace(_execution_device=torch.device("cpu")), state)
    for name in names:
        state.set(name, state.get(name).to(device))


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
    """Return noise whose values within a patch have a covariance of ``-gamma``.

    For the published ``gamma`` the matrix is singular but for 1e-8, below float32's resolution. Diffusers factorises
    it in float32 and may fail.
    """
    _, rows, columns = patch_size
    covariance = torch.eye(rows * columns, dtype=torch.float64) * (1 + gamma + JITTER) - gamma
    factor = torch.linalg.cholesky(covariance).float()
    grid = (batch, channels, frames, height // rows, width // columns)
    samples = torch.randn(*grid, rows * columns, generator=generator, device=generator.device)
    noise: Tensor = torch.unflatten(samples @ factor.T.to(samples.device), -1, (rows, columns))
    return noise.permute(0, 1, 2, 3, 5, 4, 6).reshape(batch, channels, frames, height, width).to(device)


def patch_blocks(blocks: Any) -> None:
    """Patch the noise, and turn off the progress bar of each chunk, for which diffusers has no switch."""
    replace_blocks(blocks, HeliosAddNoiseToImageLatentsStep, NoiseOnCpu)
    replace_blocks(blocks, HeliosAddNoiseToVideoLatentsStep, ClipNoiseOnCpu)
    denoise.sample_block_noise = block_noise_BCFHW
    denoise.tqdm = partial(denoise.tqdm, disable=True)


class HeliosFusedProcessor(HeliosAttnProcessor):  # type: ignore[misc]
    """Normalises and rotates queries and keys in one pass over them, where that is possible.

    The text's keys and values are made once a job.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        original_context_length: int | None = None,
    ) -> Tensor:
        """Attend. The names are those of diffusers; ``rotary_emb`` is cosines beside sines, each value twice.

        ``encoder_hidden_states`` may be stacked keys and values of the text.
        """
        if encoder_hidden_states is not None:
            attn, encoder_hidden_states = with_keys(attn, encoder_hidden_states)
        if rotary_emb is not None and attention.can_rotate(attn, hidden_states):
            cos_BL1P, sin_BL1P = (table_BLD[:, :, None, ::2] for table_BLD in rotary_emb.chunk(2, dim=-1))
            tables = RotaryTables(cos_BL1P, sin_BL1P, interleaved=True)
            attn, rotary_emb = attention.rotate_heads(attn, hidden_states, tables), None
        out_BLC: Tensor = super().__call__(
            attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, original_context_length
        )
        return out_BLC


def replace_processors(module: nn.Module) -> None:
    attention.replace_processors(module, {HeliosAttnProcessor: HeliosFusedProcessor})


def hoisted_text(module: Any, inputs: ModelInputs) -> dict[str, Tensor]:
    """Return the keys and values of the text. The module must be whole.

    Keys are normalised. 512 tokens take 420 MB in bfloat16.
    """
    text_BTC: Tensor = module.condition_embedder.text_embedder(inputs[TEXT])
    return {KEYS_VALUES: stacked_keys_values([block.attn2 for block in module.blocks], text_BTC)}


def forward(module: Any, call: Mapping[str, Any]) -> Tensor:
    """Return ``velocity_BCFHW``."""
    return forward_with_keys(module, module.blocks, call)
