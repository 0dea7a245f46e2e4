"""The transformer with what an engine must know about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engines.core.model import Branch, DenoiserModel, ModelInputs
from engines.parallel.attention import local_kernel
from pipelines.directory import load_diffusers_model, outline_diffusers_model
from pipelines.fast.flux import FluxWeights
from pipelines.flux import geometry
from pipelines.flux import latents as shapes
from pipelines.flux.attention import set_kernel
from pipelines.flux.shard_plan import SHARD_PLAN, stream_lengths

MODEL = ("diffusers.models.transformers.transformer_flux", "FluxTransformer2DModel")
PROBE_SEED = 20240801
PROBE_TEXT, PROBE_HEIGHT, PROBE_WIDTH = 22, 12, 20
"""Tokens of text, and height and width of the latent: 22 + 60 tokens, which 4 and 8 ranks must pad."""


def load_denoiser(path: Path, device: torch.device, dtype: torch.dtype) -> DenoiserModel:
    return as_denoiser(load_diffusers_model(*MODEL, path, "transformer", device, dtype))


def outline_denoiser(path: Path, dtype: torch.dtype) -> DenoiserModel:
    return as_denoiser(outline_diffusers_model(*MODEL, path, "transformer", dtype))


def as_denoiser(transformer: Any) -> DenoiserModel:
    """``transformer`` (a ``FluxTransformer2DModel``) with its plan; its attention calls the local kernel now."""
    config = transformer.config
    set_kernel(transformer, local_kernel(transformer.device, transformer.dtype))
    return DenoiserModel(
        modules={"transformer": transformer},
        plan=SHARD_PLAN,
        num_heads=config.num_attention_heads,
        head_dim=config.attention_head_dim,
        stream_lengths=stream_lengths,
        set_kernel=set_kernel,
        forward=forward,
        probe=FluxProbe(config=config, device=transformer.device, dtype=transformer.dtype),
        fast=FluxWeights,
    )


def forward(module: nn.Module, inputs: ModelInputs) -> Tensor:
    """The velocity of the image tokens, ``velocity_BSD``."""
    velocity_BSD: Tensor = module(**inputs, return_dict=False)[0]
    return velocity_BSD


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxProbe:
    """Makes the two branches (as with true guidance) of one small, seeded step, equal on every rank."""

    config: Mapping[str, Any]
    device: torch.device
    dtype: torch.dtype

    def __call__(self) -> tuple[Branch, ...]:
        generator = torch.Generator().manual_seed(PROBE_SEED)
        latents_BSD = self._randn(
            generator, PROBE_HEIGHT * PROBE_WIDTH // geometry.PATCH**2, self.config["in_channels"]
        )
        return tuple(Branch(inputs=self._inputs(generator, latents_BSD)) for _ in range(2))

    def _inputs(self, generator: torch.Generator, latents_BSD: Tensor) -> dict[str, Tensor]:
        inputs = {
            "hidden_states": latents_BSD,
            "encoder_hidden_states": self._randn(generator, PROBE_TEXT, self.config["joint_attention_dim"]),
            "pooled_projections": self._randn(generator, self.config["pooled_projection_dim"]),
            "timestep": torch.full((1,), 0.7, device=self.device, dtype=self.dtype),
            "img_ids": shapes.image_ids(PROBE_HEIGHT, PROBE_WIDTH).to(self.device),
            "txt_ids": shapes.text_ids(PROBE_TEXT).to(self.device),
        }
        if not self.config["guidance_embeds"]:
            return inputs
        return {**inputs, "guidance": torch.full((1,), 3.5, device=self.device)}

    def _randn(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn((1, *shape), generator=generator).to(self.device, self.dtype)
