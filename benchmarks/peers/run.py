"""Steps of Troupe and peers on a GPU host: many runs of ``benchmarks.model_step``, each in processes of its own.

    python -m benchmarks.peers.run OUT_DIR [ARCHIVE ...] [--limit-s 540] [--stages best quad_ring ...]

``--stages`` are runs and lists of ``runs.yaml``, in order; by default all that this host has GPUs for. A run begins as
soon as enough GPUs are free, so smaller ones run at the same time (``runs_beside`` in their results). One that fails or
hangs harms no other. Without time left for it, a run is skipped and named. CUDA_VISIBLE_DEVICES chooses the GPUs.

Peers come from PYTHONPATH, then from archives in their order, then from what is installed. An archive is for hosts
without a package index:

    python -m benchmarks.peers.pack DIR                                            once, where there is an index
    python -m benchmarks.peers.run OUT_DIR DIR/peers.tar.xz --limit-s 560 --stages best

A host needs 120 GiB of memory for a GPU on which vLLM-Omni is timed. OUT_DIR has two files that are rewritten all the
time: ``results.jsonl``, and ``logs.txt`` with the end of each process's output. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
MODEL_STEP = "benchmarks.model_step"
CUDA = Path("/usr/local/cuda")
SMALLEST_LIMIT_S, STOP_S, POLL_S, GATHER_S = 15, 35, 0.2, 5
"""``STOP_S`` is more than the 30 s that a launcher gives its ranks before it kills them."""
MOST_LOGGED = 400_000
"""Characters of one process's output."""
TAIL_LINES, FEW_LINES, LINE, ERROR_SAID = 30, 8, 200, 600
"""Lines printed of a run that fails and of one that ends well; characters of a line, and of a result's error."""
OF_PROCESS = ("hardware", "torch", "python_s")
"""Facts of a run that hold for all its results."""
NOISE = re.compile(
    r"\s*$|\{|AUTOTUNE |Autotune |strides: |dtypes: |SingleProcess AUTOTUNE |\s+\S+ [\d.]+ ms [\d.]+%"
    r"|(INFO|WARNING) \d\d-\d\d |.*(Attention backends are|OMP_NUM_THREADS|\*\*\*\*|_warn_once|Warning: Profiler)"
)
"""Lines that are not printed: kernels that a compiler tried, results, vLLM's own log, warnings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    name: str
    gpus: int
    likely_s: int
    limit_s: int
    words: str
    module: str = MODEL_STEP

    def command(self, out: Path) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.gpus}"]
        written = ["--out", str(out / f"{self.name}.json")] if self.module == MODEL_STEP else []
        own = launcher if self.gpus > 1 else []
        return [sys.executable, *own, "-m", self.module, *shlex.split(self.words), *written]


@cache
def known_runs() -> Mapping[str, tuple[Run, ...]]:
    """Return runs by the names of lists, and each by its own."""
    found: dict[str, tuple[Run, ...]] = {}
    for kind, runs in yaml.safe_load(Path(__file__).with_name("runs.yaml").read_text()).items():
        found[kind] = tuple(Run(name=f"{kind}_{name}", **run) for name, run in runs.items())
    return found | {run.name: (run,) for runs in found.values() for run in runs}


@dataclass(slots=True)
class Started:
    run: Run
    gpus: tuple[str, ...]
    process: subprocess.Popen[bytes]
    begin_s: float
    limit_s: float
    beside: int = 0
    """The most runs that were under way at the same time."""


def main() -> None:
    arguments, start_s = parse(), time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    environment = environment_with([unpacked(archive, arguments.sites) for archive in arguments.archives])
    print(f"unpacked after {time.monotonic() - start_s:.0f} s; {tools(environment)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        outcome = perform(
            chosen(arguments.stages), visible_gpus(), start_s + arguments.limit_s, work, arguments.out, environment
        )
    print(json.dumps({"stages": outcome}), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("archives", type=Path, nargs="*", metavar="ARCHIVE")
    parser.add_argument("--limit-s", type=int, default=540)
    parser.add_argument("--stages", nargs="+", default=(), choices=known_runs(), metavar="STAGE")
    temporary = Path(tempfile.gettempdir()) / "troupe_peers"
    parser.add_argument("--sites", type=Path, default=temporary, help=f"where archives are unpacked; {temporary}")
    return parser.parse_args()


def chosen(names: Iterable[str]) -> list[Run]:
    """Return the runs of ``names``, each once; all without any."""
    return list(dict.fromkeys(run for name in names or known_runs() for run in known_runs()[name]))


def perform(
    runs: Sequence[Run], gpus: Sequence[str], end_s: float, work: Path, out: Path, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return for each run "exit ... after ...", or why it was stopped or skipped. ``out`` is current all the time."""
    outcome = {run.name: f"skipped: {len(gpus)} GPUs" for run in runs if run.gpus > len(gpus)}
    threads = max(4, (os.cpu_count() or 1) // max(1, len(gpus)))  # ranks on all GPUs may compile at one time
    environment = {**environment, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    waiting, free, started = [run for run in runs if run.name not in outcome], list(gpus), list[Started]()
    beside: dict[str, int] = {}
    print(f"{sum(run.likely_s * run.gpus for run in waiting) // max(1, len(gpus))} s are likely", flush=True)
    gathered_s = time.monotonic()
    while waiting or started:
        while waiting and len(free) >= waiting[0].gpus:
            run, left_s = waiting.pop(0), end_s - time.monotonic()
            if left_s < SMALLEST_LIMIT_S:
                outcome[run.name] = f"skipped: {left_s:.0f} s left"
                continue
            started.append(
                start(run, [free.pop(0) for _ in range(run.gpus)], min(left_s, run.limit_s), work, environment)
            )
        for each in list(started):
            each.beside = beside[each.run.name] = max(each.beside, len(started) - 1)
            passed_s = time.monotonic() - each.begin_s
            if each.process.poll() is not None:
                outcome[each.run.name] = f"exit {each.process.returncode} after {passed_s:.0f} s"
            elif passed_s > each.limit_s:
                stop(each.process)
                outcome[each.run.name] = f"stopped after {passed_s:.0f} s"
            else:
                continue
            started.remove(each)
            free.extend(each.gpus)
            print(f"== {each.run.name}: {outcome[each.run.name]}", *ending(each, work), sep="\n", flush=True)
        if time.monotonic() - gathered_s > GATHER_S:
            gather(work, out, beside)
            gathered_s = time.monotonic()
        time.sleep(POLL_S)
    gather(work, out, beside)
    return outcome


def start(run: Run, gpus: Sequence[str], limit_s: float, work: Path, environment: Mapping[str, str]) -> Started:
    own = {**environment, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    with (work / f"{run.name}.log").open("w") as stream:  # its group is stopped with all that it started
        process = subprocess.Popen(run.command(work), stdout=stream, stderr=subprocess.STDOUT, env=own, process_group=0)
    return Started(run, tuple(gpus), process, time.monotonic(), limit_s)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a launcher to stop its ranks, then kill what is left: it would hold its GPU."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ending(ended: Started, work: Path) -> list[str]:
    """Return the last lines of a run's output, and the end of each error that it reports."""
    text = (work / f"{ended.run.name}.log").read_text(errors="replace")
    lines = [line for line in text.splitlines() if not NOISE.match(line)]
    lines = lines[-(FEW_LINES if ended.process.returncode == 0 else TAIL_LINES) :]
    for result in results_in(work / f"{ended.run.name}.json"):
        if "error" in result:
            lines += [f"{result['maker']} FAILED:", *result["error"].splitlines()[-FEW_LINES:]]
    return [line[:LINE] for line in lines]


def gather(work: Path, out: Path, beside: Mapping[str, int]) -> None:
    """Write the two files of ``out``: hosts hand back few files, and small ones."""
    logs = sorted(work.glob("*.log"), key=lambda path: path.stat().st_mtime)
    ends = (f"## {log.stem}\n{log.read_text(errors='replace')[-MOST_LOGGED:]}\n" for log in logs)
    (out / "logs.txt").write_text("".join(ends))
    half = work / "results.half"
    half.write_text("".join(f"{json.dumps(result)}\n" for result in collect(work, beside)))
    shutil.move(half, out / "results.jsonl")  # whole, whenever this program is stopped


def collect(work: Path, beside: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield all results with the facts of their runs, and how many ran on other GPUs at the same time."""
    for path in sorted(work.glob("*.json")):
        for result in results_in(path):
            error = {"error": result["error"].replace(f"{ROOT}/", "")[-ERROR_SAID:]} if "error" in result else {}
            others = {"runs_beside": beside[path.stem]} if beside.get(path.stem) else {}
            yield {"stage": path.stem, **result, **others, **error}


def results_in(path: Path) -> list[dict[str, Any]]:
    """Return a run's results: none if it wrote nothing, or was stopped while it wrote."""
    try:
        document = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    return [{**{name: document[name] for name in OF_PROCESS}, **result} for result in document["results"]]


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that this process sees. A process that ends counts them: this one holds none."""
    code = "import torch; print(torch.cuda.device_count())"
    number = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (seen.split(",") if seen else list(map(str, range(number))))[:number]


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


def environment_with(sites: Sequence[Path]) -> dict[str, str]:
    """Return this process's environment, in which Python searches ``sites`` after all that it names already."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    present = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *present, *map(str, sites)])
    # Images forbid bytecode, and every process would compile the same thousands of files.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if sites:
        environment["PYTHONPYCACHEPREFIX"] = str(sites[0].with_name("bytecode"))
    nvcc = shutil.which("nvcc")
    home = CUDA if not nvcc or (CUDA / "bin/nvcc").exists() else Path(nvcc).resolve().parents[1]
    environment.setdefault("CUDA_HOME", str(home))  # SGLang builds small kernels with nvcc
    return environment


def tools(environment: Mapping[str, str]) -> str:
    """Return where compilers are."""
    places = {"nvcc": f"{environment['CUDA_HOME']}/bin/nvcc", "ninja": "ninja", "c++": "c++"}
    return ", ".join(f"{name}: {shutil.which(place) or 'missing'}" for name, place in places.items())


if __name__ == "__main__":
    main()
