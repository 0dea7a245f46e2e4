"""A pipeline's transformers as the engine's ``DenoiserModel``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from engines.core.model import Arguments, DenoiserModel, dtype_of
from engines.parallel.attention.local import local_kernel
from pipelines.blocks.arguments import nested
from pipelines.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Forward:
    """Call a transformer as its pipeline does."""

    spec: ModelSpec

    def __call__(self, module: nn.Module, arguments: Arguments) -> Tensor:
        return self.spec.forward(module, nested(arguments))


def as_denoiser(
    modules: Mapping[str, Any], spec: ModelSpec, config: Mapping[str, Any], probe: Callable[[], Any]
) -> DenoiserModel:
    """Return ``modules`` with the plan of their class; their attention calls the local kernel."""
    for module in modules.values():
        spec.set_kernel(module, local_kernel(module.device, dtype_of(module)))
    num_heads, head_dim = spec.heads(config)
    return DenoiserModel(
        modules=dict(modules),
        plan=spec.shard_plan(config),
        num_heads=num_heads,
        head_dim=head_dim,
        stream_lengths=partial(spec.stream_lengths, config),
        set_kernel=spec.set_kernel,
        forward=Forward(spec),
        probe=probe,
        hoisted=spec.hoisted,
        reads_values=spec.reads_values,
        fast=spec.fast_weights(config),
        latents=spec.latents,
        timestep=spec.timestep,
    )
