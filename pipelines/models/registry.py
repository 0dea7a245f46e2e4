"""From a transformer class of diffusers to what the project knows of it, without importing the others."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import cast

from pipelines.directory import DENOISERS, part_class, read_index
from pipelines.models.architecture import Architecture

ARCHITECTURES = {
    "Cosmos3OmniTransformer": "clips.cosmos",
    "ErnieImageTransformer2DModel": "pictures.ernie_image",
    "Flux2Transformer2DModel": "pictures.flux2",
    "Flux3Transformer2DModel": "pictures.flux3",
    "FluxTransformer2DModel": "pictures.flux",
    "HeliosTransformer3DModel": "clips.helios",
    "HunyuanVideo15Transformer3DModel": "clips.hunyuan_video",
    "Krea2Transformer2DModel": "pictures.krea2",
    "LTX2VideoTransformer3DModel": "clips.ltx2",
    "LTXVideoTransformer3DModel": "clips.ltx",
    "MiniMaxH3Transformer3DModel": "clips.mini_max_h3",
    "QwenImage21Transformer2DModel": "pictures.qwen21",
    "QwenImageTransformer2DModel": "pictures.qwen",
    "SD3Transformer2DModel": "pictures.sd3",
    "WanTransformer3DModel": "clips.wan",
    "ZImageTransformer2DModel": "pictures.z_image",
}
"""Class name to the file below this folder whose ``ARCHITECTURE`` it is."""


def architecture_of(path: Path) -> Architecture:
    """What is known of the transformer of a diffusers folder. ValueError for other folders and unknown classes."""
    return load_architecture(transformer_class(path))


def transformer_class(path: Path) -> str:
    """The class of the transformer of a diffusers folder. ValueError for other folders."""
    named = [name for part in DENOISERS if (name := part_class(path, part)) is not None]
    if not named:
        raise ValueError(f"{path} holds a {read_index(path).get('_class_name')}, which has no transformer")
    return named[0]


def load_architecture(class_name: str) -> Architecture:
    """What the class's own file says, else what can be said of any class of diffusers (``generic``)."""
    if class_name in ARCHITECTURES:
        return cast(Architecture, import_module(f"pipelines.models.{ARCHITECTURES[class_name]}").ARCHITECTURE)
    return _generic(class_name)


@cache
def _generic(class_name: str) -> Architecture:
    from pipelines.models.unknown.generic import generic

    return generic(class_name)
