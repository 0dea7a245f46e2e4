"""Reads an adapter file, in any known layout, into tensors by layer."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.directory import U_NET
from pipelines.loading import resolve_file
from pipelines.lora.adapter_config import alpha_of, factor_scale, for_all_layers, has_alpha, peft_config, written_config
from pipelines.lora.differences import Scale, as_products, by_parameter, has_factors, split_differences
from pipelines.lora.source import ADAPTER_FILES, PEFT_CONFIG, LoraSource
from pipelines.lora.translation import (
    ADAPTER_NAME,
    ALPHA,
    DOWN,
    FLAT_PREFIXES,
    MAKERS_PREFIXES,
    PEFT_PREFIX,
    REPEATED,
    UP,
    UP_BIAS,
    are_layers_of,
    as_flat_pairs,
    as_pairs,
    by_loader,
    by_own_names,
    by_weights,
    keys_by_name,
    layer_of,
    read_adapter,
    shown,
    with_points,
    without_adapter_name,
)

logger = logging.getLogger(__name__)

TRANSFORMER = "transformer"
OTHER_KINDS = {"dora_scale": "DoRA", "lora_magnitude_vector": "DoRA", ".magnitude": "DoRA"}
"""Unsupported kinds of adapters, by a part of their keys."""
TEXT_ENCODERS = re.compile(r"text_encoders?(_\d)?\.|lora_te\d?_|lora_unet_llm_adapter_")
"""Prefixes of keys of text encoders and Anima's conditioner, in the layouts of diffusers, ComfyUI and kohya."""
OTHER_PARTS = re.compile(
    r"(text_encoder|text_model|text_conditioner|transformer|unet|connectors|image_encoder|vae|controlnet)[s_\d]*\."
)
"""Prefixes of keys by pipeline parts."""
CONFIGS = {PEFT_PREFIX: peft_config, "": written_config}
"""Reader of the config by prefix of keys: PEFT saved the adapter, or a transformer alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """Contents of an adapter file."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors by ``LAYER.lora_A.weight``, ``LAYER.lora_B.weight`` and ``LAYER.lora_B.bias``."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Alphas by layer."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """PEFT's own; empty if unknown."""
    whole: Mapping[str, Tensor] = field(default_factory=dict)
    """Whole differences by parameter."""

    def scale(self, layer: str, rank: int) -> float:
        """Return alpha / rank (rsLoRA: over its root, arXiv:2312.03732); 1 for files without alphas."""
        return (alpha_of(self.config, layer, rank) if self.config else self.alphas.get(layer, rank)) / rank


def read_layers(source: LoraSource, pipeline_class: Any, module: nn.Module, max_bytes: int | None = None) -> Layers:
    """Return the contents of the file of ``source`` for ``module``, its transformer or U-Net.

    Other layouts are translated by the loader of ``pipeline_class``, or like the weights of ``module``. ValueError for
    files of another kind, for unused keys and those of other parts of the pipeline, and for factors whose products
    take more than ``max_bytes``.
    """
    path = resolve_file(source.path, source.file, ADAPTER_FILES, beside=(PEFT_CONFIG,))
    tensors = without_lone_alphas(read_adapter(path), path)
    for mark, kind in OTHER_KINDS.items():
        if others := [key for key in tensors if mark in key]:
            raise ValueError(
                f"{path} is a {kind} adapter ({shown(others)}), and only LoRA, LoKr and LoHa can be added to weights "
                "here"
            )
    tensors = _without_text_encoders(tensors, source, path, pipeline_class)
    differences, rest = split_differences(tensors)
    whole = by_parameter(differences, module, path)
    if not rest:
        return Layers(whole=whole)
    config, has_scale = _config_of(rest, path), has_alpha(path) and not any(key.endswith(ALPHA) for key in rest)
    is_scaled = has_factors(rest)
    if is_scaled:
        rest = as_products(rest, _factor_scales(config) if config else None, max_bytes)
        config, has_scale = {}, False
    elif config and any(key.endswith(ALPHA) for key in rest):  # a loader would scale by both (SimpleTuner writes both)
        rest, config, is_scaled = _with_trained_alphas(rest, config), {}, True
    file = _File(
        source=source, path=path, pipeline_class=pipeline_class, module=module, config=config, is_scaled=is_scaled
    )
    return replace(file.read(rest, has_scale=has_scale), whole=whole)


def _without_text_encoders(
    tensors: Mapping[str, Tensor], source: LoraSource, path: Path, pipeline_class: Any
) -> Mapping[str, Tensor]:
    """Return ``tensors`` without those of text encoders, which few loaders know. Errors as for ``_check_others``."""
    others = [key for key in tensors if TEXT_ENCODERS.match(key)]
    _check_others(others, source, path, _denoiser_name(pipeline_class))
    return {key: x for key, x in tensors.items() if not TEXT_ENCODERS.match(key)}


def _check_others(others: Sequence[str], source: LoraSource, path: Path, name: str) -> None:
    """Raise ValueError if a file has ``others`` than keys of the denoiser ``name``, unless ``source`` has a part."""
    if others and not source.part:
        raise ValueError(
            f"{path} is not for the {name} alone: {shown(others)} belong to other parts, which are served as they "
            f"are. If the picture can do without, say part: {name}, and they are left out"
        )


def without_lone_alphas(tensors: Mapping[str, Tensor], path: Path) -> Mapping[str, Tensor]:
    """Return ``tensors`` without alphas of layers of which the file has nothing else, and log them.

    They change nothing. An alpha may have another prefix or spelling than its factors: then it stays, and so do all if
    a key is of no known kind.
    """
    layers: set[str] = set()
    for key in tensors:
        if not key.endswith(ALPHA):
            if (layer := _flat_layer(key)) is None:
                return tensors
            layers |= _names_of(layer)
    alone = [key for key in tensors if key.endswith(ALPHA) and not _names_of(_flat_layer(key) or "") & layers]
    if alone:
        logger.warning("%s has alphas of layers without factors, which change nothing: %s", path, shown(alone))
    return {key: x for key, x in tensors.items() if key not in alone}


def _flat_layer(key: str) -> str | None:
    """Return the layer of a key, without prefix and with underscores alone; None for a key of no known kind."""
    (spelled,) = as_pairs({ADAPTER_NAME.sub(r"\1.", key): torch.empty(0)})
    layer = re.sub(r"\.diff(_[bm])?$", "", layer_of(spelled))
    if layer == spelled:
        return None
    prefix = next(one for one in (*FLAT_PREFIXES, *MAKERS_PREFIXES) if layer.startswith(one))
    return layer.removeprefix(prefix).replace(".", "_")


def _names_of(layer: str) -> set[str]:
    """Return the names of a layer that some trainers write twice, or in another way."""
    twins = [(end, same) for pair in REPEATED.items() for end, same in (pair, pair[::-1])]
    return {layer, *(layer.removesuffix(end) + same for end, same in twins if layer.endswith(end))}


def _with_trained_alphas(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return ``tensors`` with alphas whose quotient by the rank is the scale, also for rsLoRA."""
    if not _bare_keys(config).get("use_rslora"):
        return tensors
    pairs = as_pairs(without_adapter_name(tensors))
    roots = {layer_of(key) + ALPHA: len(x) ** 0.5 for key, x in pairs.items() if key.endswith(DOWN)}
    return {key: x * roots.get(key, 1.0) if key.endswith(ALPHA) else x for key, x in tensors.items()}


def _factor_scales(config: Mapping[str, Any]) -> Scale:
    own = _bare_keys(config)
    return lambda layer: factor_scale(own, _bare(layer.removeprefix(PEFT_PREFIX)))


def _is_peft(tensors: Iterable[str]) -> bool:
    return all(key.startswith(PEFT_PREFIX) for key in tensors)


def _bare(key: str) -> str:
    """Return the key of a config without the name of the part, which the names of layers may lack."""
    return key.removeprefix(f"{TRANSFORMER}.").removeprefix(f"{U_NET}.")


def _bare_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return {_bare(key): value for key, value in config.items()}


def _config_of(tensors: Iterable[str], path: Path) -> Mapping[str, Any]:
    return CONFIGS[PEFT_PREFIX if _is_peft(tensors) else ""](path)


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """An adapter file, and what it is for."""

    source: LoraSource
    path: Path
    pipeline_class: Any
    module: nn.Module
    config: Mapping[str, Any]
    """PEFT's, with the names of layers in the file."""
    is_scaled: bool = False
    """True if the tensors have all scales, by their values or alphas, so that the file's header does not count."""

    def read(self, tensors: Mapping[str, Tensor], *, has_scale: bool) -> Layers:
        """Return pairs by layers of the module, from its own names, its makers' or those that a loader translates.

        ``has_scale``: the header has a scale, which the loader may know of. Otherwise it comes last, because loaders
        may leave out what the translation of weights does to rows.
        """
        plain = without_adapter_name(tensors)
        if (own := self._from_own_names(plain, has_scale=has_scale)) is not None:
            return own
        if set(plain) != set(tensors):  # by the adapter's name a loader may know a trainer's order of rows
            with suppress(ValueError):
                if self._has_pairs(found := self._translated(tensors)):
                    return found
        if (makers := self._from_makers_names(plain, has_scale=has_scale)) is not None:
            return makers
        try:
            layers = self._by_loader(plain)
        except ValueError:
            if not has_scale:
                raise
            return self.read(tensors, has_scale=False)
        if has_scale and not self._has_pairs(layers):
            return self.read(tensors, has_scale=False)
        is_peft = self.config and _is_peft(plain)
        return replace(layers, config=for_all_layers(self.config, self.path)) if is_peft else layers

    def _from_own_names(self, tensors: Mapping[str, Tensor], *, has_scale: bool) -> Layers | None:
        """Return layers in the names of the module; None for other names, and for scales that a loader knows of."""
        for prefix, config_of in CONFIGS.items():
            below = as_pairs({key: x for key, x in tensors.items() if key.startswith(prefix)}, prefix)
            if _names_layers(self.module, below):
                is_all = are_layers_of(self.module, as_pairs(tensors, prefix))
                if not is_all and self._from_makers_names(tensors, has_scale=has_scale) is not None:
                    return None
                config = _bare_keys(config_of(self.path)) if self.config else {}
                return replace(_with_alphas(as_pairs(tensors, prefix)), config=config)
        if has_scale or (pairs := by_own_names(tensors, self.module)) is None:
            return None
        return replace(_with_alphas(pairs), config=_bare_keys(self.config))

    def _from_makers_names(self, tensors: Mapping[str, Tensor], *, has_scale: bool) -> Layers | None:
        """Return layers in the makers' names, translated as weights are; None for others, as in ``_from_own_names``."""
        config = _bare_keys(self.config)
        if not _is_peft(tensors) and (has_scale or config.get("alpha_pattern")):
            return None  # patterns in a header are of names that diffusers' loader makes
        if by_own_names(tensors, self.module) is not None:
            return None  # the translation of weights may change the order of rows under names that both have
        found = by_weights(tensors, self.module, partial(alpha_of, config) if config else None)
        return None if found is None else Layers(tensors=found.tensors, alphas=found.alphas)

    def _by_loader(self, tensors: Mapping[str, Tensor]) -> Layers:
        """Return layers as diffusers' loader translates them, perhaps from the same names in kohya's spelling."""
        try:
            layers = self._translated(tensors)
        except ValueError:
            if (other := self._from_flat_names(tensors)) is None:
                raise
            return other
        return layers if self._has_pairs(layers) else self._from_flat_names(tensors) or layers

    def _from_flat_names(self, tensors: Mapping[str, Tensor]) -> Layers | None:
        """Return layers from names in kohya's spelling, or of files in that spelling from the makers' names."""
        if (pointed := with_points(tensors, self.module)) is not None:
            own = by_own_names(pointed, self.module)
            return _with_alphas(own) if own is not None else self._from_makers_names(pointed, has_scale=False)
        flat = as_flat_pairs(tensors)
        if flat is None or not hasattr(self.pipeline_class, "lora_state_dict"):
            return None
        try:
            layers = self._translated(flat)
        except ValueError:
            return None
        return layers if self._has_pairs(layers) else None

    def _has_pairs(self, layers: Layers) -> bool:
        """Return whether all of ``layers`` are pairs for the module."""
        are_pairs = all(key.endswith((UP, DOWN, UP_BIAS)) for key in layers.tensors)
        return are_pairs and are_layers_of(self.module, layers.tensors)

    def _translated(self, tensors: Mapping[str, Tensor]) -> Layers:
        layers = _translate(tensors, self.path, self.pipeline_class, self.module, is_scaled=self.is_scaled)
        return _select_part(layers, self.source, self.path, self.pipeline_class, self.module)


def _with_alphas(pairs: Mapping[str, Tensor]) -> Layers:
    layers = {layer_of(key) for key in pairs if not key.endswith(ALPHA)}
    alphas = {key: x for key, x in pairs.items() if key.endswith(ALPHA) and layer_of(key) in layers}
    return Layers(
        tensors={key: x for key, x in pairs.items() if key not in alphas},
        alphas={layer_of(key): float(x) for key, x in alphas.items()},
    )


def _translate(
    tensors: Mapping[str, Tensor], path: Path, pipeline_class: Any, module: nn.Module, *, is_scaled: bool
) -> Layers:
    """Return layers whose keys begin with a part's name, as diffusers' pipelines save or translate them."""
    header = {} if is_scaled else written_config(path)
    if hasattr(pipeline_class, "lora_state_dict"):
        found = by_loader(path, tensors, pipeline_class, module, is_scaled=is_scaled)
        config = found.config if found.config is not None else header
        return Layers(tensors=found.tensors, alphas=found.alphas, config=config)
    if not any(key.startswith(f"{TRANSFORMER}.") for key in tensors):
        raise ValueError(
            f"diffusers has no loader of adapters for {pipeline_class.__name__} that could translate {path}: save it "
            f"as its transformer does (save_lora_adapter), or as PEFT does; it has {shown(tensors)}"
        )
    return Layers(tensors=tensors, config=header)


def _denoiser_name(pipeline_class: Any) -> str:
    """Return the name of the transformer (any of several) or U-Net in files."""
    return str(getattr(pipeline_class, "transformer_name", getattr(pipeline_class, "unet_name", TRANSFORMER)))


def _names_layers(module: nn.Module, keys: Iterable[str]) -> bool:
    parameters = {name for name, _ in module.named_parameters()}
    return any(key.endswith((UP, DOWN)) and f"{layer_of(key)}.weight" in parameters for key in keys)


def _select_part(layers: Layers, source: LoraSource, path: Path, pipeline_class: Any, module: nn.Module) -> Layers:
    """Return the layers of the transformer or U-Net: those under its name, and those in its module's names."""
    name = _denoiser_name(pipeline_class) if hasattr(pipeline_class, "lora_state_dict") else TRANSFORMER
    if source.part and any(key.startswith(f"{source.part}.") for key in layers.tensors):
        name = source.part
    prefix = f"{name}."
    others = [key for key in layers.tensors if not key.startswith(prefix) and not are_layers_of(module, [key])]
    if unknown := [key for key in others if not OTHER_PARTS.match(key)]:
        raise ValueError(f"{path} has {shown(unknown)}, for which no part of the model has a place")
    _check_others(others, source, path, name)
    own, alphas = (keys_by_name(keys, lambda key: key.removeprefix(prefix)) for keys in (layers.tensors, layers.alphas))
    return Layers(
        tensors={name: layers.tensors[key] for name, key in own.items() if key not in others},
        alphas={name: layers.alphas[key] for name, key in alphas.items()},
        config={key.removeprefix(prefix): value for key, value in layers.config.items()},
    )
