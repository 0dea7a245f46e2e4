"""Scales of an adapter beside its tensors: PEFT's configuration, in a file of its own or in the header."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY

from engines.parallel.weight_files import metadata_of
from pipelines.lora.source import PEFT_CONFIG, AdapterError
from pipelines.lora.translation import PEFT_PREFIX, shown

CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""PEFT's initialisations, by their beginnings, that take the adapter's first product from the model's weights."""


def peft_config(path: Path) -> Mapping[str, Any]:
    """Return the configuration beside the file that PEFT saved; empty without one.

    ValueError for an adapter that is for changed weights of the model.
    """
    file = path.parent / PEFT_CONFIG
    config: Mapping[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return _checked(config, path)


def written_config(path: Path) -> Mapping[str, Any]:
    """Return PEFT's config from the header of a file that diffusers wrote. ValueError as for ``peft_config``."""
    config: Mapping[str, Any] = json.loads(metadata_of(path).get(LORA_ADAPTER_METADATA_KEY, "{}"))
    return _checked(config, path)


def has_alpha(path: Path) -> bool:
    """Return whether the header has an alpha for all layers, which some loaders of diffusers follow."""
    return "alpha" in metadata_of(path)


def alpha_of(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Return the number whose quotient by ``rank`` is the layer's scale (rsLoRA: alpha by its root)."""
    alpha = float(_by_pattern(config.get("alpha_pattern") or {}, layer, config.get("lora_alpha", rank)))
    return alpha * math.sqrt(rank) if config.get("use_rslora") else alpha


def factor_scale(config: Mapping[str, Any], layer: str) -> float:
    """Return the scale of a layer of PEFT's LoKr or LoHa: alpha / r, whether its factors have that rank or not."""
    name = layer.removeprefix(PEFT_PREFIX)
    alpha = _by_pattern(config.get("alpha_pattern") or {}, name, config.get("alpha", 1.0))
    return float(alpha) / float(_by_pattern(config.get("rank_pattern") or {}, name, config.get("r", 1.0)))


def for_all_layers(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return ``config``, which is beside the file, for layers under other names. AdapterError for patterns of names."""
    if patterns := config.get("alpha_pattern"):
        raise AdapterError(
            f"{path} has alphas by names of layers ({shown(patterns)}) that are translated here: save it with one "
            "alpha",
            "config",
        )
    return {key: value for key, value in config.items() if key in ("lora_alpha", "use_rslora")}


def _checked(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return ``config``, whose keys may begin with a part's name. ValueError if it is for changed weights."""
    settings = config if isinstance(config, dict) else {}
    start = next((value for key, value in settings.items() if key.endswith("init_lora_weights")), "")
    if str(start).lower().startswith(CHANGES_BASE):
        raise ValueError(
            f"{path} is an adapter for weights that {start} has changed, and these are not in the file: save it with "
            "PEFT's path_initial_model_for_weight_conversion, which makes it one for the model's own weights"
        )
    return config


def _by_pattern(patterns: Mapping[str, Any], layer: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that matches: an end of the name, or a regular expression."""
    for pattern, value in patterns.items():
        if _end_of_name(pattern).match(layer):
            return value
    return otherwise


@lru_cache(maxsize=2**14)  # files have a pattern for each of a thousand layers, and Python keeps 512
def _end_of_name(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")
