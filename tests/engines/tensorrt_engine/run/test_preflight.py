"""Checks before the first step: each failure names the rank, what was found and what was expected."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from engines.tensorrt_engine.build.bindings import Bindings, Target, load_bindings
from engines.tensorrt_engine.build.builder import BuildOptions
from engines.tensorrt_engine.build.caches import CachedEngine, EngineKey
from engines.tensorrt_engine.run import nccl, runtime
from engines.tensorrt_engine.run.nccl import (
    NcclError,
    check_loaded,
    decode_version,
    loaded_libraries,
    rank_environment,
    search,
)
from engines.tensorrt_engine.run.runtime import PreflightError, check_engine_file, current_target

SM89, SM120 = Target.parse("sm89"), Target.parse("sm120")
LIBRARY = Path("/opt/libnccl.so.2")


def engine() -> CachedEngine:
    key = EngineKey.of(b"", strategy="ulysses2", num_ranks=2, precision="fp16", options=BuildOptions(target=SM89))
    return CachedEngine(engine_file=b"", sha256="ab", key=key, build_s=1.0, was_cached=True, path=Path("x.engine"))


def test_engine_of_another_gpu() -> None:
    check_engine_file(engine(), rank=0, target=SM89)
    with pytest.raises(PreflightError, match=r"rank 3: x.engine is for another GPU: found sm89, expected sm120"):
        check_engine_file(engine(), rank=3, target=SM120)


def test_engine_of_another_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = engine()
    newer = Bindings(module=load_bindings().module, product="tensorrt", version="11.9")
    monkeypatch.setattr(runtime, "load_bindings", lambda: newer)
    with pytest.raises(PreflightError, match=r"another TensorRT's: found .*, expected tensorrt 11.9"):
        check_engine_file(stale, rank=0, target=SM89)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_no_gpu() -> None:
    with pytest.raises(PreflightError, match="engine: torch"):
        current_target(1)


def test_error_survives_pickling() -> None:
    error = PreflightError(2, "it", "this", "that")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank) == ("rank 2: it: found this, expected that", 2)


@pytest.mark.parametrize(("code", "version"), [(22809, (2, 28, 9)), (21903, (2, 19, 3)), (2708, (2, 7, 8))])
def test_nccl_version_code(code: int, version: tuple[int, int, int]) -> None:
    assert decode_version(code) == version


def test_one_nccl_of_the_right_version() -> None:
    check_loaded((LIBRARY,), {LIBRARY: (2, 28, 9)})
    other = Path("/usr/lib/libnccl.so.2")
    with pytest.raises(NcclError, match="found none"):
        check_loaded((), {})
    with pytest.raises(NcclError, match=r"/opt/libnccl.so.2, /usr/lib/libnccl.so.2: take other copies off"):
        check_loaded((LIBRARY, other), {})
    for version in ((2, 18, 5), (3, 0, 0)):
        with pytest.raises(NcclError, match=r">= 2.19, < 3"):
            check_loaded((LIBRARY,), {LIBRARY: version})


def test_loaded_libraries_are_read_from_the_process(tmp_path: Path) -> None:
    for name in ("libnccl.so.2.28.9", "libnccl-net.so"):
        (tmp_path / name).touch()
    (tmp_path / "libnccl.so.2").symlink_to(tmp_path / "libnccl.so.2.28.9")
    maps = tmp_path / "maps"
    names = ("libnccl.so.2", "libnccl.so.2.28.9", "libnccl-net.so", "libcudart.so.13")
    maps.write_text("".join(f"7f00-7f01 r-xp 0000 08:01 1234   {tmp_path}/{name}\n" for name in names))
    assert loaded_libraries(maps) == (tmp_path / "libnccl.so.2.28.9",)


def test_both_names_on_the_path_need_no_mending(tmp_path: Path) -> None:
    for name in (nccl.VERSIONED, nccl.PLAIN):
        (tmp_path / name).touch()
    assert rank_environment({"LD_LIBRARY_PATH": str(tmp_path)}, tmp_path / "links") == {}


def test_the_missing_name_is_linked_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = tmp_path / "wheel" / nccl.VERSIONED
    library.parent.mkdir()
    library.touch()
    links = tmp_path / "links"
    for _ in range(2):  # a second rank of the node finds the links there
        variables = rank_environment({"LD_LIBRARY_PATH": f"{library.parent}:/elsewhere"}, links)
        assert variables == {"LD_LIBRARY_PATH": f"{links}:{library.parent}:/elsewhere"}
        found = search([links])
        assert {path.resolve() for path in found.values()} == {library}
        assert set(found) == {nccl.VERSIONED, nccl.PLAIN}
    assert "no libnccl.so on LD_LIBRARY_PATH, where TensorRT looks: ranks get" in caplog.text


def test_no_nccl_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "wheel_folder", lambda: None)
    with pytest.raises(NcclError, match=r"pip install '.\[gpu\]'"):
        rank_environment({}, tmp_path)
