"""Plans fit the classes' own defaults, which are the published models' (FLUX.2-dev, LTX, Qwen-Image, Z-Image)."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import diffusers
import pytest
import torch
from diffusers.hooks.tensor_parallel import PackedColwiseParallel
from torch import nn

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan, named_like
from engines.core.spec import ParallelSpec
from engines.parallel.tensor import split_features
from pipelines.models.registry import FAMILY_FOLDERS, load_spec
from pipelines.models.spec import ModelSpec

DEGREES = {
    "Flux2Transformer2DModel": (2, 4, 8),
    "LTX2VideoTransformer3DModel": (2, 4, 8),
    "LTXVideoTransformer3DModel": (2, 4, 8),
    "QwenImageTransformer2DModel": (2, 4, 8),
    "ZImageTransformer2DModel": (2,),
}
"""Degrees of a tensor axis; Z-Image has 30 heads."""


@cache
def published(name: str) -> Any:
    with torch.device("meta"):
        return getattr(diffusers, name)()


def plan_of(name: str) -> ShardPlan:
    return load_spec(name).shard_plan(published(name).config)


@pytest.mark.parametrize("name", [name for name in FAMILY_FOLDERS if load_spec(name).hoisted])
def test_a_family_that_computes_inputs_once_a_job_says_how_much_memory_they_take(name: str) -> None:
    own = type(load_spec(name))
    is_counted = (own.hoisted_features, own.hoisted_numbers) != (ModelSpec.hoisted_features, ModelSpec.hoisted_numbers)
    assert is_counted, f"{own.__name__} overrides neither hoisted_features nor hoisted_numbers"


@pytest.mark.parametrize("name", DEGREES)
def test_places_exist(name: str) -> None:
    module, plan = published(name), plan_of(name)
    assert all(isinstance(module.get_submodule(blocks), nn.ModuleList) for blocks in plan.blocks)
    for shard in plan.shards:
        for inner in named_like(module, shard.module):
            assert shard.where == "output" or shard.key in inspect.signature(inner.forward).parameters, shard
    for gather in plan.gathers:
        assert named_like(module, gather.module)
    for table in plan.tables:
        assert named_like(module, table.pattern)
    for rule in plan.linears:
        assert len(named_like(module, rule.pattern)) == len(module.get_submodule(rule.pattern.split(".")[0]))


@pytest.mark.parametrize("name", DEGREES)
def test_features_divide_by_the_usual_degrees(name: str) -> None:
    module, plan = published(name), plan_of(name)
    num_heads, _ = load_spec(name).heads(module.config)
    for degree in DEGREES[name]:
        ParallelSpec(tensor=degree).check(num_heads=num_heads, features=split_features(module, plan))


def test_degrees_that_do_not_divide_the_heads_are_refused() -> None:
    features = split_features(published("ZImageTransformer2DModel"), plan_of("ZImageTransformer2DModel"))
    with pytest.raises(ValueError, match=r"tensor 4 does not fit: 30 heads, not divisible by 4; allowed: 1, 2, 5, 10"):
        ParallelSpec(tensor=4).check(num_heads=30, features=features)


@pytest.mark.parametrize("name", ["Flux2Transformer2DModel", "QwenImageTransformer2DModel"])
def test_linears_are_those_of_diffusers(name: str) -> None:
    """Packed linears name the blocks in which they are cut: shares in the plan, features in the layer."""
    module = published(name)
    ours = {rule.pattern: rule for rule in plan_of(name).linears}
    assert ours.keys() == module._tp_plan.keys()
    for pattern, theirs in module._tp_plan.items():
        layer, rule = named_like(module, pattern)[0], ours[pattern]
        is_column = theirs == "colwise" or type(theirs) is PackedColwiseParallel
        assert type(rule) is (ColumnLinear if is_column else RowLinear), pattern
        kept = getattr(layer, "_tp_packed_col_blocks" if is_column else "_tp_packed_row_blocks", (1,))
        assert isinstance(rule, ColumnLinear | RowLinear)
        assert list(rule.segments) == list(getattr(theirs, "blocks", None) or kept), pattern
