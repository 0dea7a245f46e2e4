"""The transformers of a pipeline with what an engine must know about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from engines.core.kernel import Kernel
from engines.core.model import Arguments, DenoiserModel, dtype_of
from engines.parallel.attention.local import local_kernel
from pipelines.blocks import attention
from pipelines.blocks.arguments import nested
from pipelines.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Forward:
    """Calls a transformer as its pipeline does."""

    architecture: Architecture

    def __call__(self, module: nn.Module, arguments: Arguments) -> Tensor:
        return self.architecture.forward(module, nested(arguments))


def as_denoiser(
    modules: Mapping[str, Any], architecture: Architecture, config: Mapping[str, Any], probe: Callable[[], Any]
) -> DenoiserModel:
    """``modules`` with the plan of their class; their attention calls the local kernel now."""
    set_kernel = kernel_setter(architecture)
    for module in modules.values():
        set_kernel(module, local_kernel(module.device, dtype_of(module)))
    num_heads, head_dim = architecture.heads(config)
    return DenoiserModel(
        modules=dict(modules),
        plan=architecture.shard_plan(config),
        num_heads=num_heads,
        head_dim=head_dim,
        stream_lengths=partial(architecture.stream_lengths, config),
        set_kernel=set_kernel,
        forward=Forward(architecture),
        probe=probe,
        hoisted=architecture.hoisted,
        reads_values=architecture.reads_values,
        fast=architecture.fast(config),
        latents=architecture.latents,
        timestep=architecture.timestep,
    )


def kernel_setter(architecture: Architecture) -> Callable[[nn.Module, Kernel], None]:
    return architecture.set_kernel or partial(attention.set_kernel, local=architecture.local_attention)
