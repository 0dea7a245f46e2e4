"""Published transformers at full size with random weights, and the inputs of their first step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models.making import default_dtype, draw_vectors
from engines.core.model import Branch, DenoiserModel
from pipelines.blocks import blank
from pipelines.blocks.arguments import nested
from pipelines.blocks.denoiser import as_denoiser
from pipelines.blocks.opened import OpenedPipeline
from pipelines.checkpoint import Checkpoint
from pipelines.directory import read_config

SEED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedModel:
    """``module`` is the first transformer, equal on all ranks; ``branch`` its first call. Both are on one device."""

    name: str
    module: Any
    branch: Branch
    opened: OpenedPipeline

    @classmethod
    @torch.no_grad()
    def made(cls, name: str, device: torch.device, dtype: torch.dtype, side: int, num_tokens: int) -> PublishedModel:
        """For pictures of ``side`` x ``side`` pixels and prompts of ``num_tokens``. ValueError for unknown names."""
        checkpoint = Checkpoint.of_configuration(name, device, dtype)
        opened = OpenedPipeline(checkpoint.path, device, dtype)
        request = replace(checkpoint.defaults.request(), width=side, height=side)
        generator = torch.Generator().manual_seed(SEED)
        branch, *_ = blank.first_step(opened, request, num_tokens, generator)
        return cls(name=name, module=_random(opened, device, dtype), branch=branch, opened=opened)

    def call(self) -> Tensor:
        """A forward of the module as it is now."""
        answer: Tensor = self.opened.architecture.forward(self.module, nested(self.branch.arguments))
        return answer

    def flop(self) -> int:
        """Of matrix products and attention in one forward: each weight times the tokens that it sees."""
        plain = sdpa_kernel(SDPBackend.MATH)  # the counter knows not every fused kernel
        with plain, FlopCounterMode(display=False) as counter:
            self.call()
        return int(counter.get_total_flops())

    def denoiser(self) -> DenoiserModel:
        """The module with the project's plan; its attention is ours from now on."""
        (name, *_), config = self.opened.transformers, self.opened.part_config(self.opened.transformers[0])
        return as_denoiser({name: self.module}, self.opened.architecture, config, probe=tuple)


def _random(opened: OpenedPipeline, device: torch.device, dtype: torch.dtype) -> Any:
    """As classes make them, but for norms, biases and modulations away from 1 and 0."""
    torch.manual_seed(SEED)
    name = opened.transformers[0]
    with torch.device(device), default_dtype(dtype):
        module = opened.part_class(name).from_config(dict(read_config(opened.path, name)))
        draw_vectors(module)
    return module.to(dtype).eval().requires_grad_(False)
