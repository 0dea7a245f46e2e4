"""The transformer, or the two of Wan 2.2, with what an engine must know about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engines.core.model import Branch, DenoiserModel, ModelInputs
from engines.parallel.attention import local_kernel
from pipelines.directory import has_part, load_diffusers_model, outline_diffusers_model, read_index
from pipelines.wan.attention import set_kernel
from pipelines.wan.hoisted_text import KEYS_VALUES, hoisted_text, text_replaced
from pipelines.wan.sampler import HIGH_NOISE, LOW_NOISE
from pipelines.wan.shard_plan import StreamLengths, shard_plan

MODEL = ("diffusers.models.transformers.transformer_wan", "WanTransformer3DModel")
PROBE_SEED = 20250225
PROBE_TEXT = 22
PROBE_GRID = (3, 5, 7)
"""Frames, rows and columns of tokens: 105, which 2, 4 and 8 ranks must pad."""


def load_denoiser(path: Path, device: torch.device, dtype: torch.dtype) -> DenoiserModel:
    return _of_parts(path, lambda part: load_diffusers_model(*MODEL, path, part, device, dtype))


def outline_denoiser(path: Path, dtype: torch.dtype) -> DenoiserModel:
    return _of_parts(path, lambda part: outline_diffusers_model(*MODEL, path, part, dtype))


def _of_parts(path: Path, load: Callable[[str], nn.Module]) -> DenoiserModel:
    modules = {part: load(part) for part in (HIGH_NOISE, LOW_NOISE) if has_part(path, part)}
    return as_denoiser(modules, expand_timesteps=read_index(path).get("expand_timesteps", False))


def as_denoiser(modules: Mapping[str, Any], *, expand_timesteps: bool = False) -> DenoiserModel:
    """``modules`` (``WanTransformer3DModel``) with their plan; their attention calls the local kernel now."""
    for module in modules.values():
        set_kernel(module, local_kernel(module.device, module.dtype))
    first = next(iter(modules.values()))
    return DenoiserModel(
        modules=dict(modules),
        plan=shard_plan(expand_timesteps=expand_timesteps),
        num_heads=first.config.num_attention_heads,
        head_dim=first.config.attention_head_dim,
        stream_lengths=StreamLengths(tuple(first.config.patch_size)),
        set_kernel=set_kernel,
        forward=forward,
        hoisted=hoisted_text,
        probe=WanProbe(
            modules=tuple(modules),
            config=first.config,
            expand_timesteps=expand_timesteps,
            device=first.device,
            dtype=first.dtype,
        ),
    )


def forward(module: nn.Module, inputs: ModelInputs) -> Tensor:
    """The velocity, ``velocity_BCFHW``."""
    own = {name: x for name, x in inputs.items() if name != KEYS_VALUES}
    with text_replaced(module, inputs.get(KEYS_VALUES)):
        velocity_BCFHW: Tensor = module(**own, return_dict=False)[0]
    return velocity_BCFHW


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
