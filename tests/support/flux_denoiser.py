"""A FLUX transformer of any size in an engine's form: with its plan and a probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.core.model import Branch, DenoiserModel
from pipelines.blocks import denoiser
from pipelines.models.flux.spec import PATCH, SPEC

PROBE_SEED = 20240801
PROBE_TEXT, PROBE_HEIGHT, PROBE_WIDTH = 22, 12, 20
"""Tokens of text, and height and width of the latent: 22 + 60 tokens, which 4 and 8 ranks must pad."""


def as_denoiser(transformer: Any) -> DenoiserModel:
    """Return ``transformer`` (a ``FluxTransformer2DModel``) with its plan; its attention now calls the local kernel."""
    probe = FluxProbe(config=transformer.config, device=transformer.device, dtype=transformer.dtype)
    return denoiser.as_denoiser({"transformer": transformer}, SPEC, transformer.config, probe)


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxProbe:
    """Makes the two branches (as with true guidance) of one small, seeded step, equal on every rank."""

    config: Mapping[str, Any]
    device: torch.device
    dtype: torch.dtype

    def __call__(self) -> tuple[Branch, ...]:
        generator = torch.Generator().manual_seed(PROBE_SEED)
        latents_BSD = self._randn(generator, PROBE_HEIGHT * PROBE_WIDTH // PATCH**2, self.config["in_channels"])
        return tuple(Branch(inputs=self._inputs(generator, latents_BSD)) for _ in range(2))

    def _inputs(self, generator: torch.Generator, latents_BSD: Tensor) -> dict[str, Tensor]:
        inputs = {
            "hidden_states": latents_BSD,
            "encoder_hidden_states": self._randn(generator, PROBE_TEXT, self.config["joint_attention_dim"]),
            "pooled_projections": self._randn(generator, self.config["pooled_projection_dim"]),
            "timestep": torch.full((1,), 0.7, device=self.device, dtype=self.dtype),
            "img_ids": image_ids(PROBE_HEIGHT, PROBE_WIDTH).to(self.device),
            "txt_ids": torch.zeros(PROBE_TEXT, 3).to(self.device),
        }
        if not self.config["guidance_embeds"]:
            return inputs
        return {**inputs, "guidance": torch.full((1,), 3.5, device=self.device)}

    def _randn(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn((1, *shape), generator=generator).to(self.device, self.dtype)


def image_ids(height: int, width: int) -> Tensor:
    """Return positions ``ids_S3`` (0, row, column) of the tokens of a latent; float32, which is exact."""
    rows, columns = torch.meshgrid(torch.arange(height // PATCH), torch.arange(width // PATCH), indexing="ij")
    return torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).reshape(-1, 3).float()
