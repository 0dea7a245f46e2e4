"""Everything about the denoising step that a GPU host can tell: right first, then fast, then the peers.

    python -m benchmarks.denoise_step.gpu OUT_DIR [--limit-s 560] [--stages NAME ...]

Stages run in order, each in processes of its own with a limit, so that one that fails or hangs costs no other; a stage
that the time left does not allow is passed over and named. ``peers`` are several gangs that compile at the same time
and are timed one after the other. Every case is written as it ends: OUT_DIR/<stage>.json and .log. The last line is
one JSON document with all results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.denoise_step.stages import STAGES, Run, Stage

SMALLEST_LIMIT_S = 15
STOP_S = 35
"""A launcher gives its ranks 30 s before it kills them."""
TAIL_LINES = 40
POLL_S = 0.2
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "PYTHONPYCACHEPREFIX")
"""Variables that name a folder of compiled kernels, or of Python's bytecode."""


@dataclass(slots=True)
class Started:
    """A run's process; ``turn`` is its place among those that were started with it."""

    run: Run
    turn: int
    process: subprocess.Popen[bytes]
    log: Path


def main() -> None:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    end_s = start_s + arguments.limit_s
    num_gpus = count_gpus()
    outcome: dict[str, str] = {}
    for stage in STAGES:
        if arguments.stages and stage.name not in arguments.stages:
            continue
        left_s = int(end_s - time.monotonic())
        if num_gpus < stage.min_gpus or left_s < SMALLEST_LIMIT_S:
            outcome[stage.name] = f"passed over: {num_gpus} GPUs, {left_s} s left"
            continue
        print(f"## {stage.name}, {time.monotonic() - start_s:.0f} s after the start", flush=True)
        outcome |= perform(stage, num_gpus, min(stage.limit_s, left_s), arguments.out)
        summary = {"stages": outcome, "results": collect(arguments.out)}
        (arguments.out / "all.json").write_text(json.dumps(summary))
    print(json.dumps({"stages": outcome, "results": collect(arguments.out)}), flush=True)


def perform(stage: Stage, num_gpus: int, limit_s: int, out: Path) -> dict[str, str]:
    """By run: "exit ... after ...", or that it was stopped. Prints the end of each output."""
    start_s = time.monotonic()
    meeting = out / f"meeting-{stage.name}"
    shutil.rmtree(meeting, ignore_errors=True)  # an earlier call's: nobody would wait for anybody
    started = [start(run, turn, stage, num_gpus, out, meeting) for turn, run in enumerate(stage.runs)]
    waiting, outcome = list(started), {}
    while waiting and time.monotonic() - start_s < limit_s:
        for each in [each for each in waiting if each.process.poll() is not None]:
            waiting.remove(each)
            outcome[each.run.name] = f"exit {each.process.returncode} after {time.monotonic() - start_s:.0f} s"
            leave(meeting, each.turn)
        time.sleep(POLL_S)
    for each in waiting:
        stop(each.process)
        outcome[each.run.name] = f"stopped after {time.monotonic() - start_s:.0f} s"
    for each in started:
        lines = [line[:200] for line in each.log.read_text(errors="replace").splitlines() if is_news(line)]
        print(f"== {each.run.name}: {outcome[each.run.name]}", *lines[-TAIL_LINES:], sep="\n", flush=True)
    return outcome


def start(run: Run, turn: int, stage: Stage, num_gpus: int, out: Path, meeting: Path) -> Started:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "4"}
    if run.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, run.gpus))
    if run.own_caches:
        environment |= {name: f"{own_caches()}/{name}" for name in CACHES}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # images set it, and no start would ever find bytecode
    if stage.takes_turns:
        meeting.mkdir(exist_ok=True)
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "4"  # many processes compile at one time
    log = out / f"{run.name}.log"
    (out / f"{run.name}.json").unlink(missing_ok=True)  # an earlier call's: it would pass for this run's
    command = command_of(run, num_gpus, out)
    if stage.takes_turns:
        command += ["--meet", str(meeting), "--turn", str(len(stage.runs)), str(turn)]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
    return Started(run=run, turn=turn, process=process, log=log)


@cache
def own_caches() -> str:
    return tempfile.mkdtemp(prefix="denoise_step_caches_")


def command_of(run: Run, num_gpus: int, out: Path) -> list[str]:
    ranks = len(run.gpus) or (num_gpus if run.all_gpus else 1)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    written = ["--out", str(out / f"{run.name}.json")] if run.writes_json else []
    return [sys.executable, *launcher, "-m", run.module, *written, *run.arguments]


def leave(meeting: Path, turn: int) -> None:
    """Nobody waits for a gang that has ended, however it ended."""
    if meeting.is_dir():
        (meeting / f"ready-{turn}").touch()
        (meeting / f"done-{turn}").touch()


def stop(process: subprocess.Popen[bytes]) -> None:
    """A launcher that is asked to stop stops its ranks."""
    process.terminate()
    try:
        process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


def is_news(line: str) -> bool:
    noise = ("Attention backends are", "OMP_NUM_THREADS", "****", "_warn_once", "UserWarning: Warning: Profiler")
    return bool(line.strip()) and not line.startswith("{") and not any(part in line for part in noise)


def collect(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted(out.glob("*.json")):
        if path.name == "all.json":
            continue
        document = json.loads(path.read_text())
        found.extend({"stage": path.stem, **result} for result in document.get("results", [document]))
    return found


def count_gpus() -> int:
    """Asked of a process that ends, so that this one holds no device."""
    code = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


class Arguments(argparse.Namespace):
    out: Path
    limit_s: int
    stages: tuple[str, ...]


def parse() -> Arguments:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stages", nargs="+", default=(), choices=names, help="all by default")
    parser.add_argument("--limit-s", type=int, default=560)
    return parser.parse_args(namespace=Arguments())


if __name__ == "__main__":
    main()
