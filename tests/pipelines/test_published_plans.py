"""The plans cover the published models: places are there, and all that a tensor axis should divide is divided once."""

from __future__ import annotations

import inspect
import re

import pytest
from torch import nn

from engines.core.shard_plan import named_like
from engines.core.spec import ParallelSpec
from engines.parallel.tensor import split_features
from pipelines.loading import published_models
from tests.pipelines.support.real_configs import model_of

WHOLE = ("ideogram-4", "stable-diffusion-3.5-medium", "stable-diffusion-xl-base-1.0")
"""Not divided."""
WITHOUT_TENSOR = ("ERNIE-Image", "Krea-2-Raw", "Krea-2-Turbo")
HEADS = {"Z-Image": (2,), "Z-Image-Turbo": (2,), "stable-diffusion-3.5-large": (2,), "Wan2.1-T2V-1.3B": (2, 4)}
"""Degrees of a tensor axis; the others have at least eight times some number of heads."""
MODULATION = re.compile(r"(norm\w*\.linear|_mod\.1|adaLN_modulation\.0|adaln_proj\.linear)$")
"""Linears of one vector, which every rank computes."""


def modules() -> list[str]:
    return [name for name in published_models() if name not in WHOLE]


@pytest.mark.parametrize("name", modules())
def test_places_exist(name: str) -> None:
    plan = model_of(name).plan
    for module in model_of(name).modules.values():
        assert all(isinstance(module.get_submodule(blocks), nn.ModuleList) for blocks in plan.blocks)
        for shard in plan.shards:
            for inner in named_like(module, shard.module):
                assert shard.where == "output" or shard.key in inspect.signature(inner.forward).parameters, shard
        for place in (*(gather.module for gather in plan.gathers), *(table.pattern for table in plan.tables)):
            assert named_like(module, place)


@pytest.mark.parametrize("name", modules())
def test_every_linear_of_the_tokens_is_divided_once(name: str) -> None:
    plan = model_of(name).plan
    assert (name in WITHOUT_TENSOR) == (not plan.linears)
    for module in model_of(name).modules.values() if plan.linears else ():
        for block in plan.blocks:
            for linear in linears_of(module, block):
                rules = [rule for rule in plan.linears if rule.matches(linear)]
                assert len(rules) == (0 if MODULATION.search(linear) else 1), linear
        for rule in plan.linears:
            assert named_like(module, rule.pattern)


def linears_of(module: nn.Module, block: str) -> list[str]:
    named = module.get_submodule(block).named_modules(prefix=block)
    return [name for name, inner in named if isinstance(inner, nn.Linear)]


def test_keys_of_pictures_are_divided_where_a_model_has_them() -> None:
    (module,) = model_of("Wan2.1-I2V-14B-480P").modules.values()
    added = [name for name in linears_of(module, "blocks") if "add_" in name]
    assert len(added) == 2 * 40


@pytest.mark.parametrize("name", sorted({*modules()} - {*WITHOUT_TENSOR}))
def test_features_divide_by_the_usual_degrees(name: str) -> None:
    model = model_of(name)
    for module in model.modules.values():
        for degree in HEADS.get(name, (2, 4, 8)):
            ParallelSpec(tensor=degree).check(num_heads=model.num_heads, features=split_features(module, model.plan))


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_others_have_nothing_to_divide(name: str) -> None:
    assert not model_of(name).plan.shards
    assert not model_of(name).plan.linears
