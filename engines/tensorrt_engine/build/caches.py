"""Engine files on disk: built once for all processes, written atomically, reused at the next start."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engines.core.storage import write_atomically
from engines.tensorrt_engine.build.bindings import load_bindings
from engines.tensorrt_engine.build.builder import BuildOptions, BuiltEngine, build
from engines.tensorrt_engine.build.cache_files import get_or_make
from engines.tensorrt_engine.build.progress import ProgressBar
from engines.tensorrt_engine.export.graph import EngineGraph

DEFAULT_FOLDER = Path.home() / ".cache" / "troupe" / "engines"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineKey:
    """Everything that determines an engine file."""

    graph_digest: str
    """SHA-256 of the ONNX graph."""
    strategy: str
    """Name of the division among ranks."""
    num_ranks: int
    """Size of the team."""
    precision: str
    """Quantised precision, or the model's dtype."""
    options: str
    """Target, profiles and flags as JSON."""
    product: str
    """TensorRT product (``Bindings``)."""
    version: str
    """Version of the product."""

    @classmethod
    def of(cls, graph: bytes, *, strategy: str, num_ranks: int, precision: str, options: BuildOptions) -> EngineKey:
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
class CachedEngine:
    """An engine file, built now or read with a correct checksum."""

    engine_file: bytes
    """Its bytes, as TensorRT serialized it."""
    sha256: str
    """SHA-256 of the bytes; ranks of a gang compare it."""
    key: EngineKey
    """Key of its build."""
    build_s: float
    """Seconds of the build, now or at that time."""
    was_cached: bool
    """True if it was read."""
    path: Path
    """Path of the file."""


class EngineCache:
    """A folder of ``.engine`` files; each has an ``.engine.json`` with key and checksum, written last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get_or_build(self, key: EngineKey, build: Callable[[], BuiltEngine]) -> CachedEngine:
        """Return the stored engine, or ``build()``'s. One of several concurrent processes builds; the others wait."""
        path = self._folder / f"{key.digest()[:32]}.engine"
        record = path.with_name(f"{path.name}.json")

        def make() -> CachedEngine:
            built = build()
            sha256 = hashlib.sha256(built.engine_file).hexdigest()
            write_atomically(path, built.engine_file)
            manifest = {"key": dataclasses.asdict(key), "sha256": sha256, "build_s": built.build_s}
            write_atomically(record, json.dumps(manifest, indent=1).encode())
            return CachedEngine(
                engine_file=built.engine_file,
                sha256=sha256,
                key=key,
                build_s=built.build_s,
                was_cached=False,
                path=path,
            )

        return get_or_make(record, lambda _: _read(path, record, key), make)


def _read(path: Path, record: Path, key: EngineKey) -> CachedEngine:
    """Return the stored engine. Unusable files raise ValueError, KeyError, TypeError or FileNotFoundError."""
    manifest = json.loads(record.read_text())
    if manifest["key"] != dataclasses.asdict(key):
        raise ValueError("its key differs from the requested one")
    sha256, build_s, engine_file = str(manifest["sha256"]), float(manifest["build_s"]), path.read_bytes()
    if hashlib.sha256(engine_file).hexdigest() != sha256:
        raise ValueError(f"{path.name} has a wrong checksum")
    return CachedEngine(engine_file=engine_file, sha256=sha256, key=key, build_s=build_s, was_cached=True, path=path)


def cached_engine(
    graph: EngineGraph,
    options: BuildOptions,
    cache: EngineCache,
    *,
    strategy: str,
    precision: str,
    visible: bool = False,
) -> CachedEngine:
    """Return the graph's engine for its profiles, from the cache or built. Raises as ``build`` does."""
    serialized, options = graph.serialized(), dataclasses.replace(options, profiles=graph.profiles)
    key = EngineKey.of(serialized, strategy=strategy, num_ranks=graph.num_ranks, precision=precision, options=options)
    return cache.get_or_build(key, lambda: build(serialized, options, bar=ProgressBar(visible=visible)))
