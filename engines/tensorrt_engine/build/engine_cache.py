"""Plans on disk: built once for all processes, written whole or not at all, checked before they are loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from engines.core.files import write_atomically
from engines.tensorrt_engine.build.bindings import load_bindings
from engines.tensorrt_engine.build.builder import BuildOptions, Built

logger = logging.getLogger("troupe.tensorrt")

DEFAULT_FOLDER = Path.home() / ".cache" / "troupe" / "plans"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanKey:
    """Everything that decides a plan. ``options`` holds target, profiles and flags as one line of text."""

    graph_digest: str
    strategy: str
    num_ranks: int
    precision: str
    options: str
    product: str
    version: str

    @classmethod
    def of(cls, graph: bytes, *, strategy: str, num_ranks: int, precision: str, options: BuildOptions) -> PlanKey:
        bindings = load_bindings()
        return cls(
            graph_digest=hashlib.sha256(graph).hexdigest(),
            strategy=strategy,
            num_ranks=num_ranks,
            precision=precision,
            options=json.dumps(dataclasses.asdict(options) | {"timing_cache_dir": None}, sort_keys=True),
            product=bindings.product,
            version=bindings.version,
        )

    @property
    def target(self) -> str:
        target = json.loads(self.options)["target"]
        return f"sm{target['major']}{target['minor']}"

    def digest(self) -> str:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedPlan:
    """A plan whose checksum was right when it was read. ``sha256`` is what the ranks of a gang compare."""

    plan: bytes
    sha256: str
    key: PlanKey
    build_s: float
    was_cached: bool
    path: Path


class PlanCache:
    """A folder with a ``.plan`` and a ``.json`` (its key and checksum, written last) for each plan."""

    def __init__(self, folder: Path = DEFAULT_FOLDER) -> None:
        self._folder = folder

    def get_or_build(self, key: PlanKey, build: Callable[[], Built]) -> CachedPlan:
        """The stored plan, or ``build()``'s. Of several processes that ask at once one builds, the others wait."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self._path(key, "lock")):
            return self.find(key) or self._store(key, build())

    def find(self, key: PlanKey) -> CachedPlan | None:
        """The stored plan; None when there is none or it is damaged (which is logged)."""
        manifest = self._manifest(key)
        if manifest is None:
            return None
        path = self._path(key, "plan")
        plan = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(plan).hexdigest() != manifest["sha256"]:
            logger.warning("the plan %s is damaged (wrong checksum) and will be built again", path)
            return None
        return CachedPlan(
            plan=plan, sha256=manifest["sha256"], key=key, build_s=manifest["build_s"], was_cached=True, path=path
        )

    def _manifest(self, key: PlanKey) -> dict[str, Any] | None:
        path = self._path(key, "json")
        if not path.exists():
            return None
        try:
            manifest: dict[str, Any] = json.loads(path.read_text())
            if manifest["key"] != dataclasses.asdict(key):
                raise ValueError("the key inside is another's")
            float(manifest["build_s"])
            str(manifest["sha256"])
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("the record %s is damaged (%s) and its plan will be built again", path, error)
            return None
        return manifest

    def _store(self, key: PlanKey, built: Built) -> CachedPlan:
        sha256 = hashlib.sha256(built.plan).hexdigest()
        path = self._path(key, "plan")
        write_atomically(path, built.plan)
        manifest = {"key": dataclasses.asdict(key), "sha256": sha256, "build_s": built.build_s}
        write_atomically(self._path(key, "json"), json.dumps(manifest, indent=1).encode())
        return CachedPlan(plan=built.plan, sha256=sha256, key=key, build_s=built.build_s, was_cached=False, path=path)

    def _path(self, key: PlanKey, suffix: str) -> Path:
        return self._folder / f"{key.digest()[:32]}.{suffix}"
