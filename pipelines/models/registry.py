"""From a transformer class of diffusers to what the project knows of it, without importing the others."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

from pipelines.directory import part_class, read_index
from pipelines.models.architecture import Architecture

ARCHITECTURES = {
    "Flux2Transformer2DModel": "flux2",
    "FluxTransformer2DModel": "flux",
    "QwenImage21Transformer2DModel": "qwen21",
    "QwenImageTransformer2DModel": "qwen",
    "WanTransformer3DModel": "wan",
    "ZImageTransformer2DModel": "z_image",
}
"""Class name to the file beside this one whose ``ARCHITECTURE`` it is."""


DENOISERS = ("transformer", "unet")
"""Parts of pipelines that predict."""


def architecture_of(path: Path) -> Architecture:
    """What is known of the transformer of a diffusers folder. ValueError for other folders and unknown classes."""
    named = [name for part in DENOISERS if (name := part_class(path, part)) is not None]
    if not named:
        raise ValueError(f"{path} holds a {read_index(path).get('_class_name')}, which has no transformer")
    return load_architecture(named[0])


def load_architecture(class_name: str) -> Architecture:
    """ValueError names the classes that are known."""
    if class_name not in ARCHITECTURES:
        raise ValueError(f"there is no plan to divide a {class_name}; there are for {', '.join(sorted(ARCHITECTURES))}")
    return cast(Architecture, import_module(f"pipelines.models.{ARCHITECTURES[class_name]}").ARCHITECTURE)
