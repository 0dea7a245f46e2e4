"""Wan transformers of any size, one or Wan 2.2's two, in an engine's form: with their plan and a probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.core.model import Branch, DenoiserModel
from pipelines.blocks import denoiser
from pipelines.models.wan.spec import SPEC

PROBE_SEED = 20250225
PROBE_TEXT = 22
PROBE_GRID = (3, 5, 7)
"""Frames, rows and columns of tokens: 105, which 2, 4 and 8 ranks must pad."""


def as_denoiser(modules: Mapping[str, Any], *, expand_timesteps: bool = False) -> DenoiserModel:
    """Return ``modules`` (``WanTransformer3DModel``) with their plan; their attention now calls the local kernel."""
    first = next(iter(modules.values()))
    probe = WanProbe(
        modules=tuple(modules),
        config=first.config,
        expand_timesteps=expand_timesteps,
        device=first.device,
        dtype=first.dtype,
    )
    config = {**first.config, "pipeline": {"expand_timesteps": expand_timesteps}}
    return denoiser.as_denoiser(modules, SPEC, config, probe)


@dataclass(frozen=True, kw_only=True, slots=True)
class WanProbe:
    """Makes the two branches of one small, seeded step, equal on every rank; with two transformers one for each."""

    modules: tuple[str, ...]
    config: Mapping[str, Any]
    expand_timesteps: bool
    device: torch.device
    dtype: torch.dtype

    def __call__(self) -> tuple[Branch, ...]:
        generator = torch.Generator().manual_seed(PROBE_SEED)
        size = (grid * patch for grid, patch in zip(PROBE_GRID, self.config["patch_size"], strict=True))
        shared = {
            "hidden_states": self._randn(generator, self.config["in_channels"], *size),
            "timestep": torch.full((1, *self._timesteps_per_token()), 700.0, device=self.device),
        }
        texts = [self._randn(generator, PROBE_TEXT, self.config["text_dim"]) for _ in range(2)]
        modules = (self.modules[0], self.modules[-1])
        return tuple(
            Branch(inputs={**shared, "encoder_hidden_states": text_BTC}, module=module)
            for text_BTC, module in zip(texts, modules, strict=True)
        )

    def _timesteps_per_token(self) -> tuple[int, ...]:
        frames, rows, columns = PROBE_GRID
        return (frames * rows * columns,) if self.expand_timesteps else ()

    def _randn(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn((1, *shape), generator=generator).to(self.device, self.dtype)
