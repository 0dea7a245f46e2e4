"""Reading a diffusers directory: configurations as plain JSON, parts by the class that its index names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

CONFIG_FILES = {"scheduler": "scheduler_config.json", "tokenizer": "tokenizer_config.json"}


def read_config(path: Path, part: str) -> Mapping[str, Any]:
    """The configuration of one part ("transformer", "vae", "scheduler" …). ValueError if the file is missing."""
    name = CONFIG_FILES.get(part.removesuffix("_2"), "config.json")
    return _read_json(path / part / name)


def read_index(path: Path) -> Mapping[str, Any]:
    return _read_json(path / "model_index.json")


def has_part(path: Path, part: str) -> bool:
    """Whether the index lists ``part`` (optional parts are listed as ``[null, null]`` when absent)."""
    entry = read_index(path).get(part)
    return isinstance(entry, list) and entry[0] is not None


def load_from_transformers(path: Path, part: str, **kwargs: Any) -> Any:
    """A tokenizer or text encoder, of the class that the index names."""
    import transformers

    library, class_name = read_index(path)[part]
    if library != "transformers":
        raise ValueError(f"{path}: {part} is a {library}.{class_name}; only classes of transformers are known here")
    transformers.logging.disable_progress_bar()  # it would fill the logs of servers
    return getattr(transformers, class_name).from_pretrained(path / part, **kwargs)


def load_text_model(path: Path, part: str, device: torch.device, dtype: torch.dtype) -> Any:
    return load_from_transformers(path, part, dtype=dtype).to(device).eval()


def load_diffusers_model(
    module: str, class_name: str, path: Path, part: str, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """A diffusers model from its folder, straight onto ``device`` (no second copy of the weights in CPU memory)."""
    model_class = getattr(import_module(module), class_name)
    model: nn.Module = model_class.from_pretrained(path / part, dtype=dtype, device_map={"": str(device)})
    return model.eval().requires_grad_(False)


def outline_diffusers_model(module: str, class_name: str, path: Path, part: str, dtype: torch.dtype) -> nn.Module:
    """The same model by its configuration alone, its weights' values unset; dtypes are those it would be loaded in.

    Under fake tensors it takes no memory: for exports, which need shapes and dtypes only.
    """
    import torch

    model_class = getattr(import_module(module), class_name)
    model: nn.Module = model_class.from_config(dict(read_config(path, part)))
    wide = set(model_class._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if wide & set(name.split(".")) else dtype)
    return model.eval().requires_grad_(False)


def _read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file.parent} is not part of a diffusers directory: it has no {file.name}")
    contents: Mapping[str, Any] = json.loads(file.read_text())
    return contents
