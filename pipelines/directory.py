"""Reading a diffusers directory: configurations and the index of parts, as plain JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DENOISERS = ("transformer", "transformer_ref", "unet")
"""Parts of pipelines that predict."""
CONFIG_FILES = {"scheduler": "scheduler_config.json", "tokenizer": "tokenizer_config.json"}


def read_config(path: Path, part: str) -> Mapping[str, Any]:
    """The configuration of one part ("transformer", "vae", "scheduler" …). ValueError if the file is missing."""
    name = CONFIG_FILES.get(part.removesuffix("_2"), "config.json")
    return _read_json(path / part / name)


def read_index(path: Path) -> Mapping[str, Any]:
    """What the folder's pipeline consists of, and its settings. ValueError if there is neither form of index."""
    modular = path / "modular_model_index.json"
    return _read_json(modular if modular.is_file() else path / "model_index.json")


def part_class(path: Path, part: str) -> str | None:
    """The class that the index names for a part; None if there is no such part."""
    entry = read_index(path).get(part)
    return entry[1] if isinstance(entry, list) and len(entry) > 1 else None


def _read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file.parent} is not part of a diffusers directory: it has no {file.name}")
    contents: Mapping[str, Any] = json.loads(file.read_text())
    return contents
