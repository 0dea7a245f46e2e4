"""Scales of an adapter beside its tensors: PEFT's configuration, in a file of its own or in the header."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY

from engines.parallel.weight_files import metadata_of
from pipelines.lora.source import MAX_SCALE, PEFT_CONFIG, AdapterError
from pipelines.lora.translation import PEFT_PREFIX, shown

CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""PEFT's initialisations, by their beginnings, that take the adapter's first product from the model's weights."""

KINDS = ("LORA", "LOHA", "LOKR")
"""PEFT's kinds of adapters that can be added to weights. Others have other keys and numbers."""
NUMBERS, PATTERNS = ("alpha", "lora_alpha", "r"), ("alpha_pattern", "rank_pattern")
"""Keys of PEFT with a number, and with numbers by patterns of names."""
RANKS = ("r", "rank_pattern")
"""Keys with ranks, by which alphas are divided."""
MAX_NUMBER = 2.0**127 / MAX_SCALE
"""Above it, a scale of a request is beyond float32."""


def peft_config(path: Path) -> Mapping[str, Any]:
    """Return the configuration beside the file that PEFT saved; empty without one.

    AdapterError for one that cannot be read, or has other values. ValueError for an adapter that is for changed weights
    of the model.
    """
    file = path.parent / PEFT_CONFIG
    config = _parsed(file.read_text, f"{PEFT_CONFIG} beside {path}", "config") if file.is_file() else {}
    return _for_own_weights(config, path)


def written_config(path: Path) -> Mapping[str, Any]:
    """Return PEFT's config from the header of a file that diffusers wrote. Errors as for ``peft_config``."""
    text = metadata_of(path).get(LORA_ADAPTER_METADATA_KEY, "{}")
    return _for_own_weights(_parsed(lambda: text, f"the header of {path}", "file"), path)


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


def _parsed(read: Callable[[], str], place: str, field: str) -> Mapping[str, Any]:
    """Return a configuration whose values are those of PEFT. AdapterError, with key and ``place``, for others."""
    try:
        config = json.loads(read())
    except (ValueError, OSError, RecursionError) as error:
        raise AdapterError(f"{place} is no JSON: {error}", field) from error
    try:
        _check_kind(_object(config, ""))
        for key, value in config.items():
            name = _last(key)
            if name in PATTERNS:
                for pattern, number in _object(value or {}, f"{key} ").items():
                    _check_pattern(pattern, key)
                    _check_number(number, f"{key} of {pattern!r}", is_rank=name in RANKS)
            elif name in NUMBERS:
                _check_number(value, key, is_rank=name in RANKS)
    except ValueError as error:
        raise AdapterError(f"{place} has {error}", field) from error
    return _object(config, "")


def _check_kind(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a kind of adapter that is not read here, whose numbers have other meanings."""
    kinds = {key: value for key, value in config.items() if _last(key) == "peft_type" and value}
    for key, kind in kinds.items():
        if str(kind).upper() not in KINDS:
            raise ValueError(f"{key} {kind!r:.80}; only {', '.join(KINDS)} can be added to weights here")


def _last(key: str) -> str:
    """Return a key without the name of a part, with which keys in a header begin."""
    return key.rpartition(".")[2]


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}{value!r:.80}; it must be an object")
    return value


def _check_pattern(pattern: str, key: str) -> None:
    """Raise ValueError for a pattern that cannot be matched as PEFT does, inside of another."""
    try:
        _end_of_name(pattern)
    except re.error as error:
        raise ValueError(f"a pattern in {key} that is no regular expression ({pattern}): {error}") from error


def _check_number(value: Any, name: str, *, is_rank: bool) -> None:
    """Raise ValueError for a value that gives no scale within float32."""
    is_number = isinstance(value, int | float) and abs(value) <= MAX_NUMBER
    if not is_number or (is_rank and value <= 0):
        raise ValueError(f"{name} {value!r:.80}; it must be a finite number{' above 0' if is_rank else ''}")


def _for_own_weights(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return ``config``, whose keys may begin with a part's name. ValueError if it is for changed weights."""
    start = next((value for key, value in config.items() if key.endswith("init_lora_weights")), "")
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
