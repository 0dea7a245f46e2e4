"""The engine cache handles keys, damage, interrupted writes, and two processes that want the same engine."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from engines.tensorrt_engine.build.bindings import Bindings, Target, load_bindings
from engines.tensorrt_engine.build.builder import BuildOptions, BuiltEngine, Profile
from engines.tensorrt_engine.build.caches import EngineCache, EngineKey
from tests.support.patience import PATIENCE_S

OPTIONS = BuildOptions(target=Target.parse("sm89"))


def key(graph: bytes = b"graph", **changes: object) -> EngineKey:
    facts = {"strategy": "ulysses2", "num_ranks": 2, "precision": "fp16", "options": OPTIONS} | changes
    return EngineKey.of(graph, **facts)  # type: ignore[arg-type]


def builder(engine_file: bytes = b"engine") -> BuiltEngine:
    return BuiltEngine(engine_file=engine_file, build_s=1.5)


def refuse() -> BuiltEngine:
    raise AssertionError("it should have been found")


def test_the_second_time_it_is_found(tmp_path: Path) -> None:
    first = EngineCache(tmp_path).get_or_build(key(), builder)
    again = EngineCache(tmp_path).get_or_build(key(), refuse)
    assert not first.was_cached
    assert again.was_cached
    assert (again.engine_file, again.sha256, again.build_s) == (first.engine_file, first.sha256, 1.5)
    assert again.key.target == "sm89"


SHAPES = {"x": ((1,), (2,), (3,))}


@pytest.mark.parametrize(
    "changed",
    [
        {"graph": b"other"},
        {"strategy": "allgather_kv2"},
        {"num_ranks": 4},
        {"precision": "bf16"},
        {"options": dataclasses.replace(OPTIONS, target=Target.parse("sm120"))},
        {"options": dataclasses.replace(OPTIONS, profiles=(Profile(shapes=SHAPES),))},
        {"options": dataclasses.replace(OPTIONS, weight_streaming=True)},
        {"options": dataclasses.replace(OPTIONS, strip_weights=True)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_everything_that_matters_is_in_the_key(changed: dict[str, object]) -> None:
    assert key(**changed).digest() != key().digest()  # type: ignore[arg-type]


def test_another_builder_version_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key().digest()
    newer = Bindings(module=load_bindings().module, product=load_bindings().product, version="99.0")
    monkeypatch.setattr("engines.tensorrt_engine.build.caches.load_bindings", lambda: newer)
    assert key().digest() != before


def test_where_timings_are_kept_does_not_matter(tmp_path: Path) -> None:
    assert key(options=dataclasses.replace(OPTIONS, timing_cache_dir=tmp_path)).digest() == key().digest()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "record", "foreign record"])
def test_damaged_engine_is_built_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = EngineCache(tmp_path)
    path = cache.get_or_build(key(), lambda: builder(b"sound engine")).path
    match damage:
        case "flipped":
            path.write_bytes(b"sound enginE")
        case "truncated":
            path.write_bytes(b"sound")
        case "missing":
            path.unlink()
        case "record":
            Path(f"{path}.json").write_text('{"sha256"')
        case "foreign record":
            record = Path(f"{path}.json")
            record.write_text(record.read_text().replace("fp16", "fp32"))
    rebuilt = cache.get_or_build(key(), lambda: builder(b"new engine"))
    assert rebuilt.engine_file == b"new engine"
    assert not rebuilt.was_cached
    assert "damaged" in caplog.text
    assert cache.get_or_build(key(), refuse).engine_file == b"new engine"


def test_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(_handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        EngineCache(tmp_path).get_or_build(key(), builder)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_failed_build_stores_nothing_and_frees_the_lock(tmp_path: Path) -> None:
    def broken() -> BuiltEngine:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EngineCache(tmp_path).get_or_build(key(), broken)
    assert EngineCache(tmp_path).get_or_build(key(), builder).engine_file == b"engine"


def build_slowly(folder: Path, log: Path) -> None:
    def build() -> BuiltEngine:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        return builder()

    assert EngineCache(folder).get_or_build(key(), build).engine_file == b"engine"


def test_two_processes_build_once(tmp_path: Path) -> None:
    context, log = multiprocessing.get_context("fork"), tmp_path / "log"
    processes = [context.Process(target=build_slowly, args=(tmp_path / "engines", log)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(log.read_text().splitlines()) == 1
