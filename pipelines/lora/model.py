"""A model with its adapters: those that are always there in its weights, the others known by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engines.additions.files import MergingSource
from engines.additions.weights import merge
from engines.core.additions import Addition, LowRank, LowRanks
from engines.core.model import DenoiserModel
from pipelines.lora.files import DOWN, UP, UP_BIAS, Layers, layer_of, read_layers, shown
from pipelines.lora.source import LoraSource


def with_loras(model: DenoiserModel, sources: Iterable[LoraSource], pipeline_class: Any) -> DenoiserModel:
    """Returns ``model`` with the adapters of ``sources``: added to its weights, or what branches may ask for by name.

    ``pipeline_class`` is diffusers', whose loader reads their files. ValueError for an adapter that does not fit.
    """
    merged: list[tuple[float, Addition]] = []
    additions: dict[str, dict[str, LowRanks]] = {}
    for source in sources:
        part = source.part or next(iter(model.modules))
        if part not in model.modules:
            raise ValueError(f"an adapter for part {part!r}: the model has {', '.join(model.modules)}")
        low_ranks = read_low_ranks(source, model.modules[part], pipeline_class)
        if not source.name:
            merged.append((source.scale, {part: low_ranks}))
        elif part in additions.setdefault(source.name, {}):
            raise ValueError(f"two adapters for {part} are named {source.name!r}: give each its own name")
        else:
            additions[source.name][part] = low_ranks
    return replace(_merged(model, merged), additions=additions)


def read_low_ranks(source: LoraSource, module: nn.Module, pipeline_class: Any) -> LowRanks:
    """Returns what an adapter adds to the parameters of ``module``. ValueError if it is made for another one."""
    parameters = dict(module.named_parameters())
    layers = read_layers(source, pipeline_class, module)
    low_ranks = dict(_low_ranks(layers))
    if not low_ranks:
        raise ValueError(f"{source.path} has no layers for {type(module).__name__}: is it a LoRA adapter?")
    if strange := [name for name in low_ranks if name not in parameters]:
        raise ValueError(
            f"{source.path} is for another model: it has {shown(strange)}, and {type(module).__name__} has no such "
            f"parameters, but {shown(parameters)}"
        )
    wrong = [name for name, one in low_ranks.items() if not _fits(one, parameters[name])]
    if wrong:
        raise ValueError(
            f"{source.path} is for another model: {len(wrong)} of its {len(low_ranks)} parameters have other shapes "
            f"than those of {type(module).__name__}, {wrong[0]} {_shape(low_ranks[wrong[0]])} for "
            f"{tuple(parameters[wrong[0]].shape)}"
        )
    return low_ranks


def _low_ranks(layers: Layers) -> Iterable[tuple[str, LowRank]]:
    """Yields what is added, by parameter. ValueError for keys that make no pair."""
    known = {f"{layer}{end}" for layer in layers.names for end in (UP, DOWN, UP_BIAS)}
    lone = [layer for layer in layers.names if not {layer + UP, layer + DOWN} <= set(layers.tensors)]
    if strange := sorted((set(layers.tensors) - known) | {key for key in layers.tensors if layer_of(key) in lone}):
        raise ValueError(f"an adapter's keys come in pairs of lora_A and lora_B; these are none: {shown(strange)}")
    for layer in layers.names:
        down_RK, up_NR = (layers.tensors[layer + end].flatten(1) for end in (DOWN, UP))
        scale = layers.scale(layer, down_RK.shape[0])
        yield f"{layer}.weight", LowRank(up_NR=up_NR, down_RK=down_RK, scale=scale)
        if layer + UP_BIAS in layers.tensors:
            bias_N1 = layers.tensors[layer + UP_BIAS][:, None]
            yield f"{layer}.bias", LowRank(up_NR=bias_N1, down_RK=torch.ones(1, 1), scale=scale)


def _fits(one: LowRank, weight: nn.Parameter) -> bool:
    rows, columns = weight.shape[0], weight[0].numel()
    return _shape(one) == (rows, columns) and one.up_NR.shape[1] == one.down_RK.shape[0]


def _shape(one: LowRank) -> tuple[int, int]:
    return one.up_NR.shape[0], one.down_RK.shape[1]


def _merged(model: DenoiserModel, merged: list[tuple[float, Addition]]) -> DenoiserModel:
    if not merged:
        return model
    if model.weights is not None:
        return replace(model, weights=MergingSource(source=model.weights, additions=tuple(merged)))
    for name, module in model.modules.items():
        nothing: Mapping[str, LowRank] = {}
        merge(module, ((scale, addition.get(name, nothing)) for scale, addition in merged), {})
    return model
