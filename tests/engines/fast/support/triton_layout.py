"""Triton's file cache in the layout of version 3.6, for machines without Triton.

In ``triton/runtime/cache.py`` each key has a folder, named by its digest in base32. ``put`` writes a file of it, and
``put_group`` a file ``__grp__NAME`` with the absolute paths of others. ``triton.knobs.cache`` has the folder of the
cache and the class of its managers.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class CacheKnobs:
    """Stands for ``triton.knobs.cache``."""

    manager_class: type[Any] | None = None

    @property
    def dir(self) -> str:
        return os.environ["TRITON_CACHE_DIR"]


class FileCacheManager:
    """Stands for ``triton.runtime.cache.FileCacheManager``, without folders for debugging."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        assert not override
        assert not dump
        self._folder = Path(os.environ["TRITON_CACHE_DIR"]) / key
        self._folder.mkdir(parents=True, exist_ok=True)

    def get_file(self, filename: str) -> str | None:
        file = self._folder / filename
        return str(file) if file.exists() else None

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        file = self._folder / filename
        file.write_bytes(data if isinstance(data, bytes) else data.encode())
        return str(file)

    def get_group(self, filename: str) -> dict[str, str] | None:
        if (group := self.get_file(f"__grp__{filename}")) is None:
            return None
        paths = json.loads(Path(group).read_text())["child_paths"]
        return {name: path for name, path in paths.items() if Path(path).exists()}

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        return self.put(json.dumps({"child_paths": group}), f"__grp__{filename}")


def install_layout(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this layout importable as Triton during a test. Return the stand-in for ``triton.runtime.cache``."""
    knobs = SimpleNamespace(cache=CacheKnobs())
    modules: dict[str, Any] = {name: ModuleType(name) for name in ("triton", "triton.runtime", "triton.runtime.cache")}

    def get_cache_manager(key: str) -> Any:
        manager = knobs.cache.manager_class or FileCacheManager
        return manager(base64.b32encode(bytes.fromhex(key)).decode().rstrip("="))

    for name, module in modules.items():
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    modules["triton"].knobs = knobs
    cache = modules["triton.runtime.cache"]
    cache.FileCacheManager, cache.get_cache_manager = FileCacheManager, get_cache_manager
    return cache
