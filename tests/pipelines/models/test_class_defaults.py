"""Plans against the classes' own defaults, which are the published models' (FLUX.2-dev, Qwen-Image, Z-Image)."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from engines.core.shard_plan import named_like
from pipelines.models import flux2, qwen, z_image

PLANS = {
    "Flux2Transformer2DModel": flux2.SHARD_PLAN,
    "QwenImageTransformer2DModel": qwen.SHARD_PLAN,
    "ZImageTransformer2DModel": z_image.SHARD_PLAN,
}


def published(name: str) -> Any:
    with torch.device("meta"):
        return getattr(diffusers, name)()


@pytest.mark.parametrize("name", PLANS)
def test_places_exist(name: str) -> None:
    module, plan = published(name), PLANS[name]
    assert all(isinstance(module.get_submodule(blocks), nn.ModuleList) for blocks in plan.blocks)
    for shard in plan.shards:
        for inner in named_like(module, shard.module):
            assert shard.where == "output" or shard.key in inspect.signature(inner.forward).parameters, shard
    for gather in plan.gathers:
        assert named_like(module, gather.module)
    for rule in plan.linears:
        assert len(named_like(module, rule.pattern)) == len(plan.blocks_of(module))


def test_linears_are_those_of_diffusers() -> None:
    kinds = {"colwise": "ColumnLinear", "rowwise": "RowLinear"}
    ours = {rule.pattern: type(rule).__name__ for rule in qwen.SHARD_PLAN.linears}
    assert ours == {pattern: kinds[kind] for pattern, kind in published("QwenImageTransformer2DModel")._tp_plan.items()}
