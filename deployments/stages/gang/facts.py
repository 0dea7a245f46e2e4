"""What is kept of measurements belongs to a model as it is configured, and to the software that runs it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deployments.config import ModelConfig
from deployments.names import own_version
from pipelines.loading import HUB_FILES
from pipelines.single_file import split_source

NEEDED = ("torch", "diffusers", "transformers")
OPTIONAL = ("triton", "fa3-fwd", "tensorrt", "tensorrt-rtx-cu13-libs")
"""Packages that steps call where they are installed."""

BLOBS = "blobs"


def model_facts(model: ModelConfig, folder: Path) -> dict[str, str]:
    """What is served, from a checkpoint in ``folder``, and what tells that its files were replaced."""
    files = [*_files_of(folder), *_single_files(model)]
    return {
        "model": repr([model.source, model.dtype, [repr(lora) for lora in model.loras]]),
        "files": repr([_state(path) for path in files]),
    }


def _files_of(folder: Path) -> Iterable[Path]:
    """Yield what a model is loaded from; the rest of a folder may change as it likes."""
    return sorted({path for pattern in HUB_FILES for path in folder.glob(pattern)})


def _single_files(model: ModelConfig) -> Iterable[Path]:
    """Yield weights elsewhere: a transformer by itself, and adapters, unless the hub has them under a name."""
    file, _ = split_source(model.source)
    if file is not None:
        yield file
    for lora in model.loras:
        path = Path(lora.path)
        yield from sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []


def _state(path: Path) -> tuple[str, int, int | str]:
    """Name, size, and when it was changed; of a file of the hub's cache, which is a link into its folder of blobs, the
    name there instead: that is a digest of the content, and the same wherever it was downloaded."""
    status, target = path.stat(), path.resolve()
    return path.name, status.st_size, target.name if target.parent.name == BLOBS else status.st_mtime_ns


def software_facts() -> dict[str, str]:
    """Versions, of optional packages that steps call where they are installed as well."""
    facts = {"troupe": own_version(), **{name: version(name) for name in NEEDED}}
    for name in OPTIONAL:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return facts
