"""Kernel timings kept between builds, one file per builder product, version and target."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.core.storage.files import write_atomically
from engines.tensorrt_engine.build.bindings import load_bindings
from engines.tensorrt_engine.build.cache import locked
from engines.tensorrt_engine.build.targets import Target


def attach_timing_cache(config: Any, folder: Path | None, target: Target) -> Path | None:
    """Gives ``config`` the stored timings; returns the file to store them in again, None without a cache folder."""
    if folder is None:
        return None
    bindings = load_bindings()
    path = folder / f"{bindings.product}-{bindings.version}-{target.name}.timing"
    stored = path.read_bytes() if path.exists() else b""
    with _rtx_deprecation_ignored():
        config.set_timing_cache(config.create_timing_cache(stored), False)
    return path


def store_timing_cache(config: Any, path: Path | None) -> None:
    """Merges this build's timings into the file (other builds may have added theirs meanwhile)."""
    if path is None:
        return
    with locked(path), _rtx_deprecation_ignored():
        timings = config.get_timing_cache()
        if path.exists():
            timings.combine(config.create_timing_cache(path.read_bytes()), True)
        write_atomically(path, bytes(timings.serialize()))


@contextmanager
def _rtx_deprecation_ignored() -> Iterator[None]:
    """Silences TensorRT-RTX, which compiles on the target GPU, keeps no timings and deprecates their cache."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
