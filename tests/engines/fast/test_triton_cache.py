"""Entries of Triton's cache move between nodes, with Triton if it is installed, else in its layout.

The cases "installed" and ``test_a_new_node_compiles_nothing`` need the package, and no GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engines.fast.triton_cache import has_triton, read_entry, recorded_entries, restore_entry
from tests.engines.fast.support.triton_layout import install_layout

KEY = "ab" * 32
NEEDS_TRITON = pytest.mark.skipif(not has_triton(), reason="needs the package triton")
NODE = """
import json, os, pickle, sys
from pathlib import Path
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.build import compile_module_from_src
from engines.fast.triton_cache import read_entry, recorded_entries

@triton.jit
def add(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) + 1)

C = '''#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }'''

bundle = Path(sys.argv[1])
known = pickle.loads(bundle.read_bytes()) if bundle.exists() else {}
hits = []
knobs.compilation.listener = lambda **facts: hits.append(facts["cache_hit"])
with recorded_entries(known) as folders:
    source = ASTSource(add, {"x": "*fp32", "y": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 128})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    launcher = compile_module_from_src(C, "launcher")
assert knobs.cache.manager_class is None
assert "TRITON_CACHE_MANAGER" not in os.environ
bundle.write_bytes(pickle.dumps({folder.name: read_entry(folder) for folder in folders}))
cubin = kernel.asm["cubin"].hex()
print(json.dumps({"hits": hits, "cubin": cubin, "launcher": launcher.__file__, "num_entries": len(folders)}))
"""


@pytest.fixture(params=["layout", pytest.param("installed", marks=NEEDS_TRITON)])
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return ``triton.runtime.cache`` or its stand-in."""
    return install_layout(monkeypatch) if request.param == "layout" else importlib.import_module("triton.runtime.cache")


@pytest.fixture
def entries(cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, bytes]]:
    """Return a node's entries, whose files are deleted."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    with recorded_entries({}) as folders:
        manager = cache.get_cache_manager(KEY)
        manager.put_group("kernel.json", {"kernel.cubin": manager.put(b"code", "kernel.cubin")})
    cache.get_cache_manager("cd" * 32).put(b"unused", "other.cubin")  # comes after the block
    found = {folder.name: read_entry(folder) for folder in folders}
    shutil.rmtree(tmp_path / "first")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    return found


def test_an_entry_is_found_on_another_node(cache: Any, entries: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    (name,) = entries
    assert set(entries[name]) == {"kernel.cubin", "__grp__kernel.json"}
    assert cache.get_cache_manager(KEY).get_group("kernel.json") is None  # makes an empty folder, too
    with recorded_entries(entries):
        group = cache.get_cache_manager(KEY).get_group("kernel.json")
        assert cache.get_cache_manager("ef" * 32).get_group("kernel.json") is None
    assert group == {"kernel.cubin": str(tmp_path / "second" / name / "kernel.cubin")}
    assert Path(group["kernel.cubin"]).read_bytes() == b"code"


def test_what_a_node_has_stays(cache: Any, entries: dict[str, dict[str, bytes]]) -> None:
    cache.get_cache_manager(KEY).put(b"own", "kernel.cubin")
    with recorded_entries(entries):
        assert Path(cache.get_cache_manager(KEY).get_file("kernel.cubin")).read_bytes() == b"own"


def test_an_entry_that_cannot_be_restored_is_a_warning(
    cache: Any, entries: dict[str, dict[str, bytes]], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (name,) = entries
    with recorded_entries({name: {**entries[name], "__grp__kernel.json": b"[]"}}):
        assert cache.get_cache_manager(KEY).get_file("kernel.cubin") is None
    assert "an entry of Triton's cache cannot be restored" in caplog.text
    assert [file.name for file in (tmp_path / "second").iterdir()] == [name]


def test_a_manager_of_the_user_stays(cache: Any) -> None:
    cache_knobs: Any = importlib.import_module("triton").knobs.cache
    cache_knobs.manager_class = cache.FileCacheManager
    try:
        with recorded_entries({}) as folders:
            assert cache_knobs.manager_class is cache.FileCacheManager
        assert cache_knobs.manager_class is cache.FileCacheManager
    finally:
        cache_knobs.manager_class = None
    assert not folders


def test_an_entry_that_another_process_writes_is_left_to_it(
    cache: Any, entries: dict[str, dict[str, bytes]], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Triton first writes into a folder of its own. A quicker rank on the host causes no warning."""
    (name,) = entries
    (tmp_path / "second" / name / "tmp.pid_42_1").mkdir(parents=True)
    with recorded_entries(entries):
        assert cache.get_cache_manager(KEY).get_file("kernel.cubin") is None
    assert not caplog.records
    assert [file.name for file in (tmp_path / "second" / name).iterdir()] == ["tmp.pid_42_1"]


def test_one_of_several_processes_restores(tmp_path: Path) -> None:
    files = {f"{number}.cubin": bytes([number]) * 10_000 for number in range(20)}
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: restore_entry(tmp_path / "cache" / "KEY", files), range(32)))
    assert sum(done) == 1
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["KEY"]
    assert read_entry(tmp_path / "cache" / "KEY") == files


@NEEDS_TRITON
def test_a_new_node_compiles_nothing(tmp_path: Path) -> None:
    """It compiles neither the kernel, for an absent GPU, nor a C library: the second node has no C compiler."""
    script, found = tmp_path / "node.py", []
    script.write_text(NODE)
    for node, compiler in (("first", {}), ("second", {"CC": "false"})):
        places = {"TRITON_CACHE_DIR": str(tmp_path / node), "PYTHONPATH": os.pathsep.join(sys.path), **compiler}
        command = [sys.executable, str(script), str(tmp_path / "bundle")]
        done = subprocess.run(command, env={**os.environ, **places}, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
        shutil.rmtree(tmp_path / "first", ignore_errors=True)
    first, second = found
    assert (first["hits"], second["hits"]) == ([False], [True])
    assert second["cubin"] == first["cubin"]
    assert Path(second["launcher"]).is_relative_to(tmp_path / "second")
    assert first["num_entries"] == second["num_entries"] == 2
