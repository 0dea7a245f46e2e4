"""Peers on the same weights: diffusers' own context parallelism with its own per-block compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def diffusers_step(module: Any, inputs: dict[str, Tensor], maker: str) -> Callable[[], Tensor]:
    """``maker``: "diffusers-ulysses" or "diffusers-ring". A second maker needs a process of its own: hooks stay."""
    from diffusers import ContextParallelConfig

    if module._parallel_config is None:
        degree = {maker.removeprefix("diffusers-") + "_degree": dist.get_world_size()}
        module.set_attention_backend("_native_cudnn")
        module.enable_parallelism(config=ContextParallelConfig(**degree))
        torch._dynamo.reset()
        module.compile_repeated_blocks(dynamic=False, fullgraph=True)
    return lambda: module(**inputs, return_dict=False)[0]
