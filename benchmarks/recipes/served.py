"""Configuration with recipes, an ``attention: fp8`` of a user, and adapters at run time."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.recipes.adapters import OTHER, PUBLISHED, PublishedAdapter, write_adapter
from benchmarks.serving.settings import config_of
from deployments.cli.serving import parse_config
from deployments.config import ServeConfig
from engines.parallel.flash3 import load_package
from pipelines.loading import resolve_path
from pipelines.lora.source import LoraSource
from pipelines.models.registry import spec_of
from pipelines.recipes import NO_RECIPE, Recipe

FP8 = "fp8-attention"
"""The user's recipe."""
SECOND = "second"
"""A recipe for models of which fewer than two have an adapter: the first one's settings with another adapter."""
MAX_LORA_BYTES = 4 << 30
RUNTIME_LORAS = {"max_loras": 8, "max_loaded": 8, "memory_gib": 4.0}
SEED = 1


def config_with_recipes(arguments: argparse.Namespace, adapters: Path) -> ServeConfig:
    """Return the configuration of the options with one model and its recipes, whose adapters are in ``adapters``.

    The model, and the adapters that are not there yet, are written. ValueError says what is wrong.
    """
    warm = [f"denoiser.warm_sizes=[{arguments.size}]"] if arguments.size else []
    written = arguments.model if arguments.folder is not None else None
    config = config_of(argparse.Namespace(**{**vars(arguments), "model": written, "set": [*warm, *arguments.set]}))
    document = config.model_dump(mode="json")
    args = document["applications"][0]["args"]
    args["models"] = [model := _model_of(args["models"], arguments)]
    model |= {"recipes": model["recipes"] | _recipes(arguments, model, adapters), "runtime_loras": RUNTIME_LORAS}
    args["api"] |= {"max_lora_bytes": MAX_LORA_BYTES}
    return parse_config(document)


def _model_of(models: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the model's section. ValueError for a model that is neither configured nor in a folder."""
    found = models if arguments.folder is not None else [one for one in models if one["name"] == arguments.model]
    if not found:
        names = ", ".join(one["name"] for one in models)
        raise ValueError(f"{arguments.config} has no {arguments.model}, but {names}: name one, or give a --folder")
    return found[0]


def _recipes(arguments: argparse.Namespace, model: Mapping[str, Any], adapters: Path) -> dict[str, Any]:
    path, published = resolve_path(model["path"] or model["name"], weights=False), PUBLISHED.get(arguments.model, {})
    found: dict[str, Any] = {}
    for seed, (name, adapter) in enumerate(published.items(), SEED):
        if not arguments.recipes or name in arguments.recipes:
            found[name] = _files(_written(path, adapters / name, adapter, seed))
    own = {**model["recipes"], **found}
    if len(own) < 2:
        first = next(iter(own), "")
        adapter = published.get(first) or PublishedAdapter(files=("adapter.safetensors",), layout=OTHER)
        files = _files(_written(path, adapters / SECOND, adapter, SEED + len(published)))
        found[SECOND] = {**_settings(path, first, own), **files}
    return found | ({FP8: {"attention": "fp8"}} if has_fp8_attention() else {})


def _settings(path: Path, name: str, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe, configured or shipped with the family of the model in ``path``."""
    shipped = spec_of(path).recipes(path).get(name, NO_RECIPE)
    return Recipe(**configured.get(name, {"num_inference_steps": 4})).over(shipped).settings


def has_fp8_attention() -> bool:
    """Return whether the machine computes attention in float8: a CPU emulates it."""
    return not torch.cuda.is_available() or load_package(torch.device("cuda")) is not None


def _written(model: Path, folder: Path, adapter: PublishedAdapter, seed: int) -> list[Path]:
    files = [folder / file for file in adapter.files]
    return files if all(file.is_file() for file in files) else write_adapter(model, folder, adapter, seed)


def _files(paths: list[Path]) -> dict[str, str]:
    """Return the files as keys of a recipe."""
    return {key: str(path.resolve()) for key, path in zip(("path", "path_2"), paths, strict=False)}


def sources_of(config: ServeConfig, model: str, recipe: str) -> tuple[LoraSource, ...]:
    """Return the adapters of a model's recipe: one for each transformer."""
    (found,) = (one for one in config.app.models if one.name == model)
    return found.recipes[recipe].sources(recipe)
