"""Cache keys of measurements: the model as configured, and the software versions."""

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
"""Packages that steps use if installed."""

BLOBS = "blobs"


def model_facts(model: ModelConfig, folder: Path) -> dict[str, str]:
    """Return the cache key of a model: its configuration, and the state of its files in ``folder``."""
    files = [*_files_of(folder), *_single_files(model)]
    return {
        "model": repr([model.source, model.dtype, [repr(lora) for lora in model.loras]]),
        "files": repr([_state(path) for path in files]),
    }


def _files_of(folder: Path) -> Iterable[Path]:
    """Return the files that a model is loaded from; other files do not count."""
    return sorted({path for pattern in HUB_FILES for path in folder.glob(pattern)})


def _single_files(model: ModelConfig) -> Iterable[Path]:
    """Yield weights outside the folder: a single-file transformer, and local adapters."""
    file, _ = split_source(model.source)
    if file is not None:
        yield file
    for lora in model.loras:
        path = Path(lora.path)
        yield from sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []


def _state(path: Path) -> tuple[str, int, int | str]:
    """Return name, size and mtime; for a link into the hub's blobs, the blob's name (a digest) for the mtime."""
    status, target = path.stat(), path.resolve()
    return path.name, status.st_size, target.name if target.parent.name == BLOBS else status.st_mtime_ns


def software_facts() -> dict[str, str]:
    """Return the versions of the packages that steps use."""
    facts = {"troupe": own_version(), **{name: version(name) for name in NEEDED}}
    for name in OPTIONAL:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return facts
