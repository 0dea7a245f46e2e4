"""Contents of the peers' archive."""

from __future__ import annotations

import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks.peers import pack
from tests.benchmarks.peers.test_fatbin import NEWER, OURS, container, emptied, library

WANTED = (
    "sglang/multimodal_gen/runtime/models/dits/flux.py",
    "sglang/multimodal_gen/configs/models/dits/flux.py",
    "sglang/kernels/jit/include/sgl_kernel/tensor.h",
    "sgl_kernel/scalar_type.py",
    "fa3_fwd/_C.abi3.so",
    "fa3_fwd_interface.py",
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/third_party/pynvml.py",
    "vllm/models/__init__.py",
    "vllm-0.30.0.dist-info/METADATA",
    "vllm-0.30.0.dist-info/entry_points.txt",
    "vllm_omni/diffusion/models/flux/flux_transformer.py",
    "vllm_omni/model_executor/model_loader/weight_utils.py",
    "pyzmq.libs/libzmq-2f02442c.so.5.2.5",
    "tvm_ffi/core.abi3.so",
)
UNWANTED = (
    "sgl_kernel/flash_ops.abi3.so",
    "sgl_kernel/sm90/common_ops.abi3.so",
    "sglang/srt/rust_extensions/_server.cpython-312-x86_64-linux-gnu.so",
    "sglang/srt/models/qwen3.py",
    "sglang/multimodal_gen/test/server/test_server.py",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm/include/cute/arch/mma_sm90_gmma_ext.hpp",
    "vllm/model_executor/layers/fused_moe/configs/E=8,N=7168.json",
    "vllm/models/kimi_k3/nvidia/kda.py",
    "vllm_omni/model_executor/models/step_audio2/assets/default_female.wav",
    "dill/tests/test_nested.py",
    "dill-0.4.1.data/scripts/undill",
    "vllm-0.30.0.dist-info/RECORD",
)


@pytest.mark.parametrize("path", WANTED)
def test_what_is_imported_is_wanted(path: str) -> None:
    assert pack.is_wanted(path)


@pytest.mark.parametrize("path", UNWANTED)
def test_what_is_not_imported_is_left_out(path: str) -> None:
    assert not pack.is_wanted(path)


def test_every_distribution_has_one_version() -> None:
    lines = [line for line in pack.REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in lines)
    assert {line.split("==")[0] for line in lines} >= {"sglang", "sglang-kernel", "vllm", "vllm-omni", "fa3-fwd"}


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    contents = {
        "vllm-0.30.0.whl": {
            pack.TRIMMED: library(container(NEWER, OURS)),
            "vllm/__init__.py": b"",
            "vllm/vllm-rs": b"x",
        },
        "fa3_fwd-0.0.3.whl": {"fa3_fwd/_C.abi3.so": library(container(NEWER, OURS))},
    }
    for name, files in contents.items():
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for path, content in files.items():
                wheel.writestr(zipfile.ZipInfo(path, (2026, 9, 22, 2, 13, 0)), content)
    return [tmp_path / name for name in contents]


def test_the_archive_has_what_is_wanted_and_of_one_library_only_the_code_for_the_gpu(
    wheels: list[Path], tmp_path: Path
) -> None:
    archive = tmp_path / "peers.tar.xz"
    pack.write(archive, wheels)
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "site", filter="data")
    found = {
        path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*") if path.is_file()
    }
    assert found == {pack.TRIMMED, "vllm/__init__.py", "fa3_fwd/_C.abi3.so"}
    assert (tmp_path / "site" / pack.TRIMMED).read_bytes() == library(container(emptied(NEWER), OURS))
    assert (tmp_path / "site/fa3_fwd/_C.abi3.so").read_bytes() == library(container(NEWER, OURS))


def test_the_same_wheels_make_the_same_bytes(wheels: list[Path], tmp_path: Path) -> None:
    pack.write(tmp_path / "one.tar.xz", wheels)
    pack.write(tmp_path / "other.tar.xz", reversed(wheels))
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "other.tar.xz").read_bytes()


def test_wheels_are_those_of_the_host_and_come_without_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    pack.download(tmp_path)
    (command,) = commands
    assert {"--no-deps", "--only-binary=:all:", "--python-version=3.12", "--abi=cp312", f"--dest={tmp_path}"} < {
        *command
    }
    assert {"--platform=manylinux_2_34_x86_64", "--platform=manylinux2014_x86_64"} < {*command}
    assert "--platform=manylinux_2_35_x86_64" not in command
