"""Peers beside Troupe on a host without a package index: unpack archives, check each peer, time what is there.

    python -m benchmarks.peers.pack DIR                                            once, where there is an index
    python -m benchmarks.peers.run OUT_DIR DIR/peers.tar.xz --limit-s 540          on a host of one, two or four GPUs

The number of GPUs chooses the stages, most important first. ``--stages`` names others, or fewer:

    python -m benchmarks.peers.run OUT_DIR peers.tar.xz --limit-s 560 --stages best    peers at their best settings
    python -m benchmarks.peers.run OUT_DIR peers.tar.xz --limit-s 540 --stages peers_of_one diffusers_of_one
    python -m benchmarks.peers.run OUT_DIR peers.tar.xz --limit-s 540 --stages peers_of_klein peers_of_qwen
    python -m benchmarks.peers.run OUT_DIR peers.tar.xz --limit-s 540 --stages sglang_compiled_of_one

A host of one GPU needs 120 GiB of memory: each of three processes holds the model, vLLM-Omni's twice. Packages come
from PYTHONPATH, then from the archives in their order, then from what is installed. OUT_DIR has two files that are
rewritten all the time: ``results.jsonl``, and ``logs.txt`` with the end of each process's output. Stages and last line
are those of ``benchmarks.denoise_step.gpu``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.denoise_step.gpu import collect, count_gpus
from benchmarks.denoise_step.stages import NAMED, stages_of_host
from benchmarks.peers.check import CHECKS

CHECK_S = 90
CHECK_LINES = 8
GATHER_S = 5
MOST_LOGGED = 400_000
"""Characters of one process's output."""
ROOT = Path(__file__).resolve().parents[2]
CUDA = Path("/usr/local/cuda")


def main() -> None:
    start_s = time.monotonic()
    arguments = parse()
    stages = arguments.stages or [stage.name for stage in stages_of_host(count_gpus())]
    arguments.out.mkdir(parents=True, exist_ok=True)
    environment = environment_with([unpacked(archive, arguments.sites) for archive in arguments.archives])
    print(f"unpacked after {time.monotonic() - start_s:.0f} s; {tools(environment)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        check(work, environment, limit_s=arguments.check_s)
        gather(work, arguments.out)
        left_s = int(arguments.limit_s - (time.monotonic() - start_s))
        print(f"checked after {time.monotonic() - start_s:.0f} s; {', '.join(stages)} within {left_s} s", flush=True)
        sys.exit(perform(stages, left_s, work, arguments.out, environment))


def perform(stages: Sequence[str], limit_s: int, work: Path, out: Path, environment: dict[str, str]) -> int:
    """Return the exit code of the stages, which write into ``work``. ``out`` is current all the time, in case this
    program is stopped."""
    options = [str(work), f"--limit-s={limit_s}", "--stages", *stages]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.denoise_step.gpu", *options], env=environment)
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(GATHER_S)
        gather(work, out)
        if process.returncode is not None:
            return process.returncode


def gather(work: Path, out: Path) -> None:
    """Write the two files of ``out``: hosts hand back few files, and small ones."""
    logs = sorted(work.glob("*.log"), key=lambda path: path.stat().st_mtime)
    ends = (f"## {log.stem}\n{log.read_text(errors='replace')[-MOST_LOGGED:]}\n" for log in logs)
    (out / "logs.txt").write_text("".join(ends))
    half = work / "results.half"
    half.write_text("".join(f"{json.dumps(result)}\n" for result in collect(work)))
    shutil.move(half, out / "results.jsonl")  # whole, whenever this program is stopped


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("archives", type=Path, nargs="+", metavar="ARCHIVE")
    parser.add_argument("--limit-s", type=int, default=540)
    parser.add_argument("--check-s", type=float, default=CHECK_S, help=f"of it for the checks; {CHECK_S}")
    parser.add_argument("--stages", nargs="+", default=(), choices=NAMED, metavar="STAGE")
    temporary = Path(tempfile.gettempdir()) / "troupe_peers"
    parser.add_argument("--sites", type=Path, default=temporary, help=f"where archives are unpacked; {temporary}")
    return parser.parse_args()


def unpacked(archive: Path, sites: Path) -> Path:
    """Return the folder of an archive's content, which is unpacked once."""
    with archive.open("rb") as stream:
        site = sites / hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    if not site.exists():
        half = site.with_suffix(".half")
        shutil.rmtree(half, ignore_errors=True)
        with tarfile.open(archive) as tar:
            tar.extractall(half, filter="data")
        half.rename(site)
    return site


def environment_with(sites: list[Path]) -> dict[str, str]:
    """Return this process's environment, in which Python searches ``sites`` after all that it names already."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    present = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *present, *map(str, sites)])
    # Images forbid bytecode, and every process would compile the same thousands of files.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(sites[0].with_name("bytecode"))
    nvcc = shutil.which("nvcc")
    home = CUDA if not nvcc or (CUDA / "bin/nvcc").exists() else Path(nvcc).resolve().parents[1]
    environment.setdefault("CUDA_HOME", str(home))  # SGLang builds small kernels with nvcc
    return environment


def tools(environment: dict[str, str]) -> str:
    """Return where compilers are."""
    places = {"nvcc": f"{environment['CUDA_HOME']}/bin/nvcc", "ninja": "ninja", "c++": "c++"}
    return ", ".join(f"{name}: {shutil.which(place) or 'missing'}" for name, place in places.items())


def check(
    out: Path, environment: dict[str, str], names: Iterable[str] = tuple(CHECKS), limit_s: float = CHECK_S
) -> list[str]:
    """Run checks at the same time. Print what each found, and return the names of those that failed."""
    start_s = time.monotonic()
    started = {name: _start_check(name, out, environment) for name in names}
    failed = []
    for name, process in started.items():
        try:
            code: int | str = process.wait(max(0.0, limit_s - (time.monotonic() - start_s)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = f"stopped after {limit_s:g} s"
        lines = [line[:300] for line in _log(out, name).read_text(errors="replace").splitlines()]
        if code == 0:
            print(f"check {name}: good: {lines[-1]}", flush=True)
        else:
            failed.append(name)
            print(f"check {name}: FAILED ({code})", *lines[-CHECK_LINES:], sep="\n", flush=True)
    return failed


def _start_check(name: str, out: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.peers.check", name]
    with _log(out, name).open("w") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)


def _log(out: Path, name: str) -> Path:
    return out / f"check_{name}.log"


if __name__ == "__main__":
    main()
