"""Maps a transformer class of diffusers to its ``ModelSpec``, importing no other family."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import cast

from pipelines.directory import DENOISERS, U_NET, has_own_inputs, part_class, read_index
from pipelines.models.spec import ModelSpec

logger = logging.getLogger(__name__)

FAMILY_FOLDERS = {
    "Cosmos3OmniTransformer": "cosmos",
    "ErnieImageTransformer2DModel": "ernie_image",
    "Flux2Transformer2DModel": "flux2",
    "Flux3Transformer2DModel": "flux3",
    "FluxTransformer2DModel": "flux",
    "HeliosTransformer3DModel": "helios",
    "HunyuanVideo15Transformer3DModel": "hunyuan_video",
    "Ideogram4Transformer2DModel": "ideogram4",
    "Krea2Transformer2DModel": "krea2",
    "LTX2VideoTransformer3DModel": "ltx2",
    "LTXVideoTransformer3DModel": "ltx",
    "MiniMaxH3Transformer3DModel": "mini_max_h3",
    "QwenImage21Transformer2DModel": "qwen_image21",
    "QwenImageTransformer2DModel": "qwen_image",
    "SD3Transformer2DModel": "sd3",
    "WanAnimate2Transformer3DModel": "wan_animate2",
    "WanTransformer3DModel": "wan",
    "WanVACETransformer3DModel": "wan_vace",
    "ZImageTransformer2DModel": "z_image",
}
"""Class name of a transformer to the folder of its family, which has the spec as ``spec.SPEC``."""


def spec_of(path: Path) -> ModelSpec:
    """Return the spec of a diffusers folder: of its transformer, or of its pipeline if no modular blocks serve that.

    ValueError for other folders and unknown classes.
    """
    name = transformer_class(path)
    has_family = name in FAMILY_FOLDERS and (
        not has_own_inputs(path) or read_index(path).get("_class_name") in load_spec(name).control_pipelines
    )
    return (None if has_family else _whole_spec(path)) or load_spec(name)


def transformer_class(path: Path) -> str:
    """Return the name of the transformer's class. ValueError for a folder that is not a diffusers pipeline's."""
    names = [name for part in DENOISERS if (name := part_class(path, part)) is not None]
    if not names:
        raise ValueError(f"{path} holds a {read_index(path).get('_class_name')}, which has no transformer")
    return names[0]


def load_spec(class_name: str) -> ModelSpec:
    """Return the family's spec, else a generic one. ValueError if diffusers has no such class."""
    if class_name in FAMILY_FOLDERS:
        return cast(ModelSpec, import_module(f"pipelines.models.{FAMILY_FOLDERS[class_name]}.spec").SPEC)
    return _generic_spec(class_name)


def _whole_spec(path: Path) -> ModelSpec | None:
    from pipelines.models.generic.whole import whole_spec

    spec = whole_spec(path)
    if spec is not None:
        _log_whole(spec.family)
    return spec


@cache
def _log_whole(family: str) -> None:
    """Log once a process that a pipeline runs whole: a start opens its folder several times."""
    logger.warning("diffusers has no blocks for the %s: its own call runs on one rank a gang", family)


@cache
def _generic_spec(class_name: str) -> ModelSpec:
    module_class = getattr(import_module("diffusers"), class_name, None)
    if module_class is None:
        raise ValueError(f"diffusers has no class {class_name}, and no family here knows it")
    from pipelines.models.generic.converted import ConvertedSpec, can_be_divided
    from pipelines.models.generic.spec import GenericSpec, UNetSpec

    if can_be_divided(module_class):
        logger.warning("%s has no family here: it is divided by diffusers' own plan, if at all", class_name)
        return ConvertedSpec(module_class)
    logger.warning("%s has no family here, and no plan in diffusers: it runs on one rank a gang", class_name)
    return UNetSpec(module_class) if U_NET in class_name.lower() else GenericSpec(module_class)
