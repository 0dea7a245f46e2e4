"""Archive of peers and what they import, for a GPU host without a package index (Linux x86_64, CPython 3.12).

    python -m benchmarks.peers.pack OUT_DIR

Downloads the packages of requirements.txt beside this file (0.8 GB) and writes OUT_DIR/peers.tar.xz for
``benchmarks.peers.run``. The host has PyTorch and transformers already. The archive has the Python code that FLUX's
transformer imports, and few libraries: SGLang's and most of vLLM's need another PyTorch, or are for language models.
"""

from __future__ import annotations

import argparse
import calendar
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.peers.fatbin import only_for

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PYTHON = "3.12"
NEWEST_GLIBC = 34
"""2.34, which SGLang's wheel needs."""
SPEC = 90
"""Architecture of H100 and H200."""

TRIMMED = "vllm/_C_stable_libtorch.abi3.so"
"""vLLM's kernels that any PyTorch can load, normalizations among them."""
KEPT = (TRIMMED, "*.dist-info/METADATA", "*.dist-info/entry_points.txt")
"""Files that are kept even if LEFT_OUT matches. ``*`` also matches folders."""
LEFT_OUT = (
    "*.dist-info/*",
    "*.data/*",  # commands and manual pages
    "*configs*.json",  # sizes of blocks of experts' kernels, by GPU
    *("*/test/*", "*/tests/*", "*/benchmark/*", "*/benchmarks/*", "*/apps/*"),
    *("sgl_kernel/*.so", "sglang/*.so", "triton_kernels/*"),
    *("vllm/*.so", "vllm/vllm-rs", "vllm/third_party/*/*"),
    # Language models.
    *("sglang/srt/models/*", "vllm/models/*/*"),
    *("vllm_omni/model_executor/models/*", "vllm_omni/model_executor/stage_input_processors/*"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    archive = out / "peers.tar.xz"
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder))
        write(archive, Path(folder).glob("*.whl"))
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")


def download(folder: Path) -> None:
    """Download wheels for the host, whatever this machine's Python and system."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, 4, -1)]  # pip prefers the first
    platforms += [f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")]
    options = [f"--platform={platform}" for platform in platforms]
    options += [f"--abi={abi}" for abi in ("cp" + PYTHON.replace(".", ""), "abi3", "none")]
    options += ["--implementation=cp", f"--python-version={PYTHON}", "--only-binary=:all:", "--no-deps"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options]
    subprocess.run([*command, f"--dest={folder}", f"--requirement={REQUIREMENTS}"], check=True)


def write(archive: Path, wheels: Iterable[Path]) -> None:
    """Write the wanted files of wheels. The same wheels give the same bytes."""
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for wheel in sorted(wheels):
            for member, content in contents(wheel):
                tar.addfile(member, io.BytesIO(content))


def contents(wheel: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield the wanted files of a wheel, by name."""
    with zipfile.ZipFile(wheel) as opened:
        for info in sorted(opened.infolist(), key=lambda info: info.filename):
            if info.is_dir() or not is_wanted(info.filename):
                continue
            content = opened.read(info)
            if info.filename == TRIMMED:
                content = only_for(content, SPEC)
            member = tarfile.TarInfo(info.filename)
            member.size, member.mtime = len(content), calendar.timegm(info.date_time)
            yield member, content


def is_wanted(path: str) -> bool:
    """Return whether a file of a wheel goes into the archive."""
    return any(fnmatchcase(path, rule) for rule in KEPT) or not any(fnmatchcase(path, rule) for rule in LEFT_OUT)


if __name__ == "__main__":
    main()
