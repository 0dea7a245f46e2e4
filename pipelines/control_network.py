"""A model with a control network or a latent upsampler that is stored apart from it.

It is opened as one diffusers folder with links to the parts of the model and to that part, and an index of both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.directory import MODULAR_INDEX, has_part, linked_folder, part_class, read_index

PART = "controlnet"
UPSAMPLER = "upsampler"
UPSAMPLER_FOLDER, UPSAMPLER_CLASS = "latent_upsampler", "LatentUpsamplerModel"
FOLDERS = "controlled"
"""Place of such folders in the Hugging Face cache."""


@dataclass(frozen=True, slots=True)
class SeparatePart:
    """A part that is stored apart from its model."""

    place: str
    """A folder or a hub id."""
    kind: str = PART
    """Its key in the configuration: ``controlnet`` or ``upsampler``."""


def control_defaults(path: Path, network_class: str) -> Mapping[str, Any]:
    """Return the fields of ``Defaults`` for the control network of a folder; empty if it has none.

    ValueError for a network of another class.
    """
    if not has_part(path, PART):
        return {}
    if (kind := part_class(path, PART)) != network_class:
        raise ValueError(f"the {PART} of {path} is a {kind}; this model follows a {network_class}: take such a one")
    return {"takes_control": True, "control_scale": 1.0, "takes_control_guidance": True}


def joined_folder(model: Path, part: Path, kind: str = PART) -> Path:
    """Return the diffusers folder with the parts of ``model`` and the control network or upsampler in ``part``.

    It is made at the first call, and the same for equal folders. ValueError if ``model`` has a modular index, or
    ``part`` is not such a model of diffusers.
    """
    model, part = model.resolve(), part.resolve()
    if kind == UPSAMPLER:
        others = {UPSAMPLER_FOLDER: _upsampler_in(part)}
        return linked_folder(model, FOLDERS, f"{model}\n{part}", read_index(model), others)
    return linked_folder(model, FOLDERS, f"{model}\n{part}", _index(model, part), {PART: part})


def _upsampler_in(folder: Path) -> Path:
    """Return ``folder`` or the one inside it that holds the upsampler, as in a folder of its pipeline."""
    for place in (folder, folder / UPSAMPLER_FOLDER):
        file = place / "config.json"
        if file.is_file() and str(json.loads(file.read_text()).get("_class_name")).endswith(UPSAMPLER_CLASS):
            return place
    raise ValueError(
        f"{folder} holds no {UPSAMPLER_CLASS}: give a folder with its config.json and weights, one with a folder "
        f"{UPSAMPLER_FOLDER}, or a hub id"
    )


def _index(model: Path, network: Path) -> dict[str, object]:
    if (model / MODULAR_INDEX).is_file():
        raise ValueError(f"{model} has a modular index: name the control network there, as its part {PART}")
    file = network / "config.json"
    kind = json.loads(file.read_text()).get("_class_name") if file.is_file() else None
    if kind is None:
        raise ValueError(
            f"{network} is no control network of diffusers: give a folder with its config.json and weights, or a hub id"
        )
    return {**read_index(model), PART: ["diffusers", kind]}
