"""The plans fit the published models, built without weights, and diffusers' own plans."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from engines.core.model import DenoiserModel
from engines.core.shard_plan import ColumnLinear, FullWidthNorm, RowLinear, TokenShard
from tests.pipelines.support.real_configs import FLUX, WAN

NAMES = [*FLUX, *WAN]
TENSOR_DEGREES = {12: (2, 4), 24: (2, 4, 8), 40: (2, 4, 8)}


@cache
def build(name: str) -> DenoiserModel:
    from diffusers import FluxTransformer2DModel, WanTransformer3DModel

    from tests.support.flux_denoiser import as_denoiser as as_flux
    from tests.support.wan_denoiser import as_denoiser as as_wan

    with torch.device("meta"):
        if name in FLUX:
            return as_flux(FluxTransformer2DModel.from_config(FLUX[name].config))
        transformer = WanTransformer3DModel.from_config(WAN[name].config)
    parts = ("transformer", "transformer_2")[: WAN[name].num_transformers]
    index = WAN[name].index or {}
    return as_wan(dict.fromkeys(parts, transformer), expand_timesteps=index.get("expand_timesteps", False))


def matched(transformer: nn.Module, pattern: str) -> dict[str, nn.Module]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return {name: module for name, module in transformer.named_modules() if expression.fullmatch(name)}


def num_blocks(transformer: nn.Module, pattern: str) -> int:
    return len(getattr(transformer, pattern.split(".")[0]))


@pytest.mark.parametrize("name", NAMES)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    published = {**FLUX, **WAN}[name]
    modules = build(name).modules
    assert len(modules) == published.num_transformers
    for transformer in modules.values():
        assert sum(parameter.numel() for parameter in transformer.parameters()) == published.num_parameters


@pytest.mark.parametrize("name", NAMES)
def test_every_pattern_matches_once_a_block(name: str) -> None:
    model = build(name)
    transformer = model.modules["transformer"]
    for layer in model.plan.linears:
        kind = nn.RMSNorm if isinstance(layer, FullWidthNorm) else nn.Linear
        found = matched(transformer, layer.pattern)
        assert len(found) == num_blocks(transformer, layer.pattern), layer
        assert all(type(module) is kind for module in found.values()), layer


@pytest.mark.parametrize("name", NAMES)
def test_every_attention_and_mlp_linear_is_split_once(name: str) -> None:
    model = build(name)
    transformer = model.modules["transformer"]
    split = [name for layer in model.plan.linears for name in matched(transformer, layer.pattern)]
    assert len(split) == len(set(split))
    for list_name in model.plan.blocks:
        for linear_name, module in getattr(transformer, list_name).named_modules(prefix=list_name):
            is_modulation = re.search(r"\.norm\w*\.linear$", linear_name)
            if isinstance(module, nn.Linear) and not is_modulation:
                assert linear_name in split


@pytest.mark.parametrize("name", NAMES)
def test_features_divide_by_the_usual_degrees(name: str) -> None:
    model = build(name)
    transformer = model.modules["transformer"]
    for degree in TENSOR_DEGREES[model.num_heads]:
        assert model.num_heads % degree == 0
        for layer in model.plan.linears:
            for module in matched(transformer, layer.pattern).values():
                assert all(size % degree == 0 for size in split_sizes(layer, module)), (layer, degree)


def split_sizes(layer: ColumnLinear | RowLinear | FullWidthNorm, module: Any) -> list[int]:
    if isinstance(layer, ColumnLinear):
        return [module.out_features]
    if isinstance(layer, FullWidthNorm):
        return [module.normalized_shape[0]]
    share, rest = divmod(module.in_features, sum(layer.segments))
    assert rest == 0
    return [segment * share for segment in layer.segments]


@pytest.mark.parametrize("name", NAMES)
def test_norms_over_all_heads_are_full_width_and_per_head_norms_whole(name: str) -> None:
    model = build(name)
    transformer = model.modules["transformer"]
    patterns = [layer.pattern for layer in model.plan.linears if isinstance(layer, FullWidthNorm)]
    full_width = {name for pattern in patterns for name in matched(transformer, pattern)}
    for name, module in transformer.named_modules():
        if isinstance(module, nn.RMSNorm):
            assert module.normalized_shape == (
                (model.num_heads * model.head_dim,) if name in full_width else (model.head_dim,)
            )


@pytest.mark.parametrize("name", NAMES)
def test_blocks_and_places_exist(name: str) -> None:
    model = build(name)
    transformer = model.modules["transformer"]
    assert all(isinstance(getattr(transformer, blocks), nn.ModuleList) for blocks in model.plan.blocks)
    assert {shard.stream for shard in model.plan.shards} == set(model.plan.streams)
    for gather in model.plan.gathers:
        assert isinstance(transformer.get_submodule(gather.module), nn.Linear)
        assert gather.stream in model.plan.streams
    for shard in model.plan.shards:
        module = transformer.get_submodule(shard.module)
        if shard.where == "input":
            assert shard.key in inspect.signature(module.forward).parameters, shard


@pytest.mark.parametrize("name", NAMES)
def test_token_shards_are_those_of_diffusers(name: str) -> None:
    """Diffusers' plan splits per-token timesteps whenever present; ours names them if the model has them."""
    model = build(name)
    transformer: Any = model.modules["transformer"]
    ours = {(shard.module, shard.key): shard.dim for shard in model.plan.shards}
    theirs = {
        (module, key): entry.split_dim
        for module, entries in transformer._cp_plan.items()
        if isinstance(entries, dict)
        for key, entry in entries.items()
    }
    if name in WAN and not (WAN[name].index or {}).get("expand_timesteps"):
        del theirs["", "timestep"]
    assert ours == theirs
    gathers = {gather.module: gather.dim for gather in model.plan.gathers}
    assert gathers == {"proj_out": transformer._cp_plan["proj_out"].gather_dim}


def test_flux_linears_are_those_of_diffusers() -> None:
    model = build("FLUX.1-dev")
    transformer: Any = model.modules["transformer"]
    kinds = {"colwise": ColumnLinear, "rowwise": RowLinear}
    theirs = {
        pattern: kinds[kind] if isinstance(kind, str) else RowLinear for pattern, kind in transformer._tp_plan.items()
    }
    assert {layer.pattern: type(layer) for layer in model.plan.linears} == theirs
    block = transformer.single_transformer_blocks[0]
    packed = next(layer for layer in model.plan.linears if layer.pattern == "single_transformer_blocks.*.proj_out")
    assert isinstance(packed, RowLinear)
    assert split_sizes(packed, block.proj_out) == block.proj_out._tp_packed_row_blocks


def test_only_per_token_timesteps_are_split() -> None:
    timestep = TokenShard(module="", where="input", key="timestep", dim=1, stream="video")
    assert [name for name in WAN if timestep in build(name).plan.shards] == ["Wan2.2-TI2V-5B"]


@pytest.mark.parametrize("name", NAMES)
def test_stream_lengths_count_the_tokens_of_real_requests(name: str) -> None:
    model, meta = build(name), torch.device("meta")
    if name in FLUX:
        inputs = {
            "hidden_states": torch.empty(1, 4096, 64, device=meta),
            "encoder_hidden_states": torch.empty(1, 512, 4096, device=meta),
        }
        assert model.stream_lengths(inputs) == {"text": 512, "image": 4096}
    else:
        latents = torch.empty(1, 16, 21, 60, 104, device=meta)
        assert model.stream_lengths({"hidden_states": latents}) == {"video": 32760}
