"""A part's model from its folder, by diffusers or transformers, and checked: whole, all of it read, finite."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from diffusers import ModelMixin
from safetensors.torch import load_file
from torch import Tensor

from engines.parallel.weight_files import NAME, files_of, tensor_files, tensor_names
from engines.quantization.scaled_files import dequantised, find_scales
from pipelines.checked import check_finite, check_whole, faults_of, without_other_parts

ENCODER_NAME = "model.safetensors"
"""What transformers calls its file."""
QUANTIZATION = "quantization_config"
PATH = "pretrained_model_name_or_path"


def load_folder(spec: Any, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the model of ``spec``, a component of diffusers' modular pipelines, whose files are in ``folder``.

    ValueError, which names tensors, if files and model do not belong together, or a value is not finite.
    """
    kind = spec.type_hint
    is_own = issubclass(kind, ModelMixin)
    settings = {"dtype": dtype, "device_map": {"": str(device)}, "output_loading_info": True}
    try:
        if (tensors := None if is_own else _multiplied_out(folder, dtype)) is not None:
            config = kind.config_class.from_pretrained(str(folder))
            model, report = kind.from_pretrained(None, config=config, state_dict=tensors, **settings)
        else:
            place = {name: value for name in spec.loading_fields() if (value := getattr(spec, name)) is not None}
            shapes = {} if is_own else {"ignore_mismatched_sizes": True}  # they are in the report
            model, report = kind.from_pretrained(place.pop(PATH), **place, **shapes, **settings)
    except Exception as error:
        lacks = _lacking(kind, folder) if is_own else ""
        raise ValueError(f"the {spec.name} in {folder} cannot be loaded: {lacks or error}") from error
    unread = report["unexpected_keys"]
    mismatched = [f"{name} {tuple(own)} for {tuple(written)}" for name, written, own in report["mismatched_keys"]]
    check_whole(
        folder,
        kind.__name__,
        missing=[*report["missing_keys"], *mismatched],
        unread=unread if is_own else without_other_parts(model, unread),
    )
    check_finite(model, lambda name: file_of(folder, name))
    return model


def _lacking(kind: Any, folder: Path) -> str:
    """What diffusers, which then cannot place the model on a device, does not say."""
    try:
        with init_empty_weights():
            model = kind.from_config(kind.load_config(str(folder)))
        names = names_in(folder)
    except (OSError, ValueError):
        return ""
    missing = [name for name, _ in model.named_parameters() if name not in names] if names else []
    return faults_of(kind.__name__, missing=missing, unread=())


def check_names(model: Any, folder: Path) -> None:
    """Raise ValueError if files in diffusers' layout have keys that ``model`` has no place for.

    What they lack is told by whoever reads a tensor. Nothing but the heads of files is read here.
    """
    names = names_in(folder)
    unread = names - find_scales(names).beside - set(model.state_dict())
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    check_whole(
        folder,
        type(model).__name__,
        missing=(),
        unread=[name for name in unread if not any(re.search(pattern, name) for pattern in patterns)],
    )


def has_scales(folder: Path) -> bool:
    """Whether weights of a part have scales beside them, and no library's own quantiser is configured."""
    return QUANTIZATION not in _written(folder) and bool(find_scales(names_in(folder)).beside)


def names_in(folder: Path) -> frozenset[str]:
    """Return the keys of a part's files, whatever an index says. ValueError for a file that is none."""
    return frozenset(name for file in _files(folder) for name in tensor_names(file))


def file_of(folder: Path, name: str) -> Path:
    """Return the file that has a tensor, or the folder where names in the files are other ones."""
    for usual in (NAME, ENCODER_NAME):
        if (file := tensor_files(folder, usual).get(name)) is not None:
            return folder / file
    return folder


def _files(folder: Path) -> tuple[Path, ...]:
    return files_of(folder) or files_of(folder, ENCODER_NAME)


def _written(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return config


def _multiplied_out(folder: Path, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Weights for transformers, where the files have them scaled."""
    if not has_scales(folder):
        return None
    return dequantised({name: x for file in _files(folder) for name, x in load_file(file).items()}, dtype)
