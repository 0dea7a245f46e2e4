"""SGLang's and vLLM-Omni's transformers of FLUX.2, Z-Image, Qwen-Image, Wan and Cosmos 3 as published, on one GPU or
with their own Ulysses on several."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.models.published import PublishedModel
from benchmarks.peers import sglang_models, vllm_omni_models

MAKERS = ("vllm-omni", "vllm-omni-eager", "sglang", "sglang-blocks")


def peer_of(model: PublishedModel, maker: str) -> Callable[[], Tensor]:
    """Returns a step of all branches that gives what ``model.call`` gives, in inference mode.

    ValueError for makers and transformers that are not here.
    """
    if maker not in MAKERS:
        raise ValueError(f"unknown peer {maker!r}; known: {', '.join(MAKERS)}")
    project = sglang_models if maker.startswith("sglang") else vllm_omni_models
    transformer, prepare = project.transformer_of(model, maker)
    calls = [prepare(transformer, own) for own in model.own_calls]

    @torch.inference_mode()
    def step() -> Tensor:
        outputs = [call() for call in calls]
        return torch.cat([x.flatten() for x in tree_leaves(outputs) if isinstance(x, Tensor)])

    return step
