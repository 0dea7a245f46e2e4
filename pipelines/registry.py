"""From a diffusers directory to its model family, without importing the others."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import cast

from pipelines.family import Family

FAMILIES = {
    "FluxPipeline": "pipelines.flux",
    "WanPipeline": "pipelines.wan",
}
"""Diffusers pipeline class (``_class_name`` in model_index.json) to the package whose ``FAMILY`` serves it."""


def load_family(path: Path) -> Family:
    """The family that serves the diffusers directory ``path``. ValueError names what is there and what is known."""
    class_name = pipeline_class(path)
    if class_name not in FAMILIES:
        raise ValueError(f"{path} holds a {class_name}; known pipelines: {', '.join(sorted(FAMILIES))}")
    return cast(Family, import_module(FAMILIES[class_name]).FAMILY)


def pipeline_class(path: Path) -> str:
    index = path / "model_index.json"
    if not index.is_file():
        raise ValueError(f"{path} is not a diffusers directory: it has no model_index.json")
    return str(json.loads(index.read_text())["_class_name"])
