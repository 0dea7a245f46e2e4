"""Adds adapters to a model: unnamed ones to its weights, named ones for requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engines.additions import MergingSource, merge
from engines.core.model import Addition, DenoiserModel, LowRank, LowRanks
from pipelines.lora.files import Layers, read_layers
from pipelines.lora.source import MAX_SCALE, LoraSource
from pipelines.lora.translation import DOWN, UP, UP_BIAS, layer_of, shown


def with_loras(model: DenoiserModel, sources: Iterable[LoraSource], pipeline_class: Any) -> DenoiserModel:
    """Return ``model`` with the adapters of ``sources``: merged into its weights, or selectable by name.

    The loader of diffusers' ``pipeline_class`` reads the files. ValueError for an adapter that does not fit.
    """
    merged: list[tuple[float, Addition]] = []
    additions: dict[str, dict[str, LowRanks]] = {}
    for source in sources:
        part = source.part or next(iter(model.modules))
        if part not in model.modules:
            raise ValueError(f"an adapter for part {part!r}: the model has {', '.join(model.modules)}")
        found = read_low_ranks(source, model.modules[part], pipeline_class)
        if source.name and model.fast is not None:
            check_linears(source, model.modules[part], found)
        if not source.name:
            merged.append((source.scale, {part: found}))
        elif part in additions.setdefault(source.name, {}):
            raise ValueError(f"two adapters for {part} are named {source.name!r}: give each its own name")
        else:
            additions[source.name][part] = found
    return replace(_merge(model, merged), additions=additions)


def read_low_ranks(
    source: LoraSource, module: nn.Module, pipeline_class: Any, max_bytes: int | None = None
) -> LowRanks:
    """Return an adapter's additions to the parameters of ``module``.

    ValueError, which names the file, if it is damaged or for another model, or is of factors whose products take more
    than ``max_bytes``.
    """
    try:
        return _low_ranks(source, module, pipeline_class, max_bytes)
    except ValueError as error:
        if source.path in str(error):
            raise
        raise ValueError(f"{source.path}: {error}") from error


def _low_ranks(source: LoraSource, module: nn.Module, pipeline_class: Any, max_bytes: int | None) -> LowRanks:
    parameters = dict(module.named_parameters())
    layers = read_layers(source, pipeline_class, module, max_bytes)
    found = dict(_of_pairs(layers))
    for name, difference in _of_differences(layers):
        if name in found:
            raise ValueError(
                f"{source.path} has a pair and a whole difference for {name}: only one of them can be added"
            )
        found[name] = difference
    if not found:
        raise ValueError(f"{source.path} has no layers for {type(module).__name__}: is it a LoRA adapter?")
    if unknown := [name for name in found if name not in parameters]:
        raise ValueError(
            f"{source.path} is for another model: it has {shown(unknown)}, and {type(module).__name__} has no such "
            f"parameters, but {shown(parameters)}"
        )
    wrong = [name for name, addition in found.items() if not _fits(addition, parameters[name])]
    if wrong:
        raise ValueError(
            f"{source.path} is for another model: {len(wrong)} of its {len(found)} parameters have other shapes "
            f"than those of {type(module).__name__}, {wrong[0]} {_shape(found[wrong[0]])} for "
            f"{tuple(parameters[wrong[0]].shape)}"
        )
    for name, addition in found.items():
        if not abs(addition.scale) * MAX_SCALE <= torch.finfo(torch.float32).max:
            raise ValueError(f"{source.path} has the scale {addition.scale:g} for {name}: is its alpha damaged?")
    return found


def _of_pairs(layers: Layers) -> Iterable[tuple[str, LowRank]]:
    """Yield the products of pairs by parameter. ValueError for keys without a partner, and for other shapes."""
    tensors = layers.tensors
    names = tuple(dict.fromkeys(layer_of(key) for key in tensors))
    expected = {f"{layer}{end}" for layer in names for end in (UP, DOWN, UP_BIAS)}
    single = [layer for layer in names if not {layer + UP, layer + DOWN} <= set(tensors)]
    if unpaired := sorted((set(tensors) - expected) | {key for key in tensors if layer_of(key) in single}):
        raise ValueError(f"an adapter's keys come in pairs of lora_A and lora_B; these are none: {shown(unpaired)}")
    if odd := [key for key, x in tensors.items() if (x.ndim > 1) == key.endswith(UP_BIAS) or not x.numel()]:
        raise ValueError(
            f"factors are matrices and biases vectors, with at least one element; these are not: {shown(odd)}"
        )
    for layer in names:
        down_RK, up_NR = (tensors[layer + end].flatten(1) for end in (DOWN, UP))
        scale = layers.scale(layer, down_RK.shape[0])
        yield f"{layer}.weight", LowRank(up_NR=up_NR, down_RK=down_RK, scale=scale)
        if layer + UP_BIAS in tensors:
            bias_N1 = tensors[layer + UP_BIAS][:, None]
            yield f"{layer}.bias", LowRank(up_NR=bias_N1, down_RK=torch.ones(1, 1), scale=scale)


def _of_differences(layers: Layers) -> Iterable[tuple[str, LowRank]]:
    """Yield whole differences as products with an identity: exact, since each sum has one term."""
    for name, difference in layers.whole.items():
        whole_NK = difference.flatten(1) if difference.ndim > 1 else difference.reshape(-1, 1)
        num_rows, num_columns = whole_NK.shape
        diagonal = torch.eye(min(num_rows, num_columns), dtype=whole_NK.dtype)
        halves = (diagonal, whole_NK) if num_rows < num_columns else (whole_NK, diagonal)
        yield name, LowRank(up_NR=halves[0], down_RK=halves[1])


def check_linears(source: LoraSource, module: nn.Module, found: LowRanks) -> None:
    """Raise ValueError for other parameters than matrices and biases: hand-ordered steps hold copies of these."""
    matrices = {name for name, x in module.named_parameters() if x.ndim > 1}
    biases = {f"{name.removesuffix('.weight')}.bias" for name in matrices}
    if others := set(found) - matrices - biases:
        raise ValueError(
            f"{source.path} changes {shown(others)}, which cannot change from request to request for "
            f"{type(module).__name__}: serve it without a name, and it is always there"
        )


def _fits(addition: LowRank, weight: nn.Parameter) -> bool:
    rows, columns = weight.shape[0], weight[0].numel()
    return _shape(addition) == (rows, columns) and addition.up_NR.shape[1] == addition.down_RK.shape[0]


def _shape(addition: LowRank) -> tuple[int, int]:
    return addition.up_NR.shape[0], addition.down_RK.shape[1]


def _merge(model: DenoiserModel, merged: list[tuple[float, Addition]]) -> DenoiserModel:
    if not merged:
        return model
    if model.weights is not None:
        return replace(model, weights=MergingSource(source=model.weights, additions=tuple(merged)))
    for name, module in model.modules.items():
        nothing: Mapping[str, LowRank] = {}
        with model.device:  # for weights that still lie on the host
            merge(module, ((scale, addition.get(name, nothing)) for scale, addition in merged), {})
    return model
