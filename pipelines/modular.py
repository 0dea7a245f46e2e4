"""Diffusers' modular pipeline of a checkpoint, found by the index of its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.directory import read_index

CLASSIC, MODULAR, FROM_PICTURE = "Pipeline", "ModularPipeline", "ImageToVideo"


def open_modular(path: Path) -> Any:
    """Return its blocks and settings, without weights. ValueError if diffusers has no blocks for the folder."""
    import diffusers

    name = str(read_index(path).get("_class_name"))
    try:
        pipeline = diffusers.ModularPipeline.from_pretrained(str(path))
        if not pipeline.blocks.sub_blocks and (same := _modular_class(path, name)) is not None:
            pipeline = same(pretrained_model_name_or_path=str(path))
    except (OSError, AttributeError, ValueError, TypeError) as error:
        if (same := _modular_class(path, name)) is None:
            raise ValueError(f"{_refusal(path, name)} ({error})") from error
        pipeline = same(pretrained_model_name_or_path=str(path))
    if not pipeline.blocks.sub_blocks:
        raise ValueError(_refusal(path, name))
    return pipeline


def pipelines_with_blocks() -> tuple[str, ...]:
    """Return the classes of diffusers' modular pipelines, named after the classic ones."""
    from diffusers.modular_pipelines.modular_pipeline import MODULAR_PIPELINE_MAPPING

    return tuple(sorted({make() for make in MODULAR_PIPELINE_MAPPING.values()}))


def _modular_class(path: Path, name: str) -> Any:
    """Return the modular class by name and settings; diffusers' own search covers only ``AutoPipeline``."""
    import diffusers
    from diffusers.modular_pipelines.modular_pipeline import MODULAR_PIPELINE_MAPPING

    modular = name if name.endswith(MODULAR) else name.removesuffix(CLASSIC).removesuffix(FROM_PICTURE) + MODULAR
    special = (make(read_index(path)) for make in MODULAR_PIPELINE_MAPPING.values() if make() == modular)
    return getattr(diffusers, next(special, modular), None) if modular != MODULAR else None


def _refusal(path: Path, name: str) -> str:
    known = ", ".join(pipelines_with_blocks())
    return f"diffusers has no blocks for the {name} in {path}; it has {known}, and for classic pipelines of these names"
