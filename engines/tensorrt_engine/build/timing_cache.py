"""Kernel timings kept between builds, one file per builder product, version and target."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from engines.core.files import write_atomically
from engines.tensorrt_engine.build.bindings import load_bindings
from engines.tensorrt_engine.build.targets import Target


def attach(config: Any, folder: Path | None, target: Target) -> Path | None:
    """Give ``config`` the stored timings; return the file to store them in again, None without a cache folder."""
    if folder is None:
        return None
    bindings = load_bindings()
    path = folder / f"{bindings.product}-{bindings.version}-{target.name}.timing"
    stored = path.read_bytes() if path.exists() else b""
    with _rtx_may_say_that_it_keeps_none():
        config.set_timing_cache(config.create_timing_cache(stored), False)
    return path


def store(config: Any, path: Path | None) -> None:
    """Merge this build's timings into the file (other builds may have added theirs meanwhile)."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"), _rtx_may_say_that_it_keeps_none():
        timings = config.get_timing_cache()
        if path.exists():
            timings.combine(config.create_timing_cache(path.read_bytes()), True)
        write_atomically(path, bytes(timings.serialize()))


@contextmanager
def _rtx_may_say_that_it_keeps_none() -> Iterator[None]:
    """TensorRT-RTX compiles on the target GPU and deprecates timing caches; TensorRT does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
