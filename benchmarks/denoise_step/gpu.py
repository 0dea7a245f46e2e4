"""Measurements of the denoising step on a GPU host: first what is right, then what is fast, then the peers.

    python -m benchmarks.denoise_step.gpu OUT_DIR [--limit-s 560] [--stages NAME ... [--together]]

Stages run in order (that of ``--stages``, if given). Each runs in its own processes with a time limit, so a stage that
fails or hangs costs no other. A stage for which too little time is left is skipped and named. In the stages of peers,
several gangs compile at the same time and are timed one after the other. A gang that is not ready when most of its
stage's time is over is stopped, and the others are timed without it. ``--together`` joins the named stages into one,
where GPUs have the memory. CUDA_VISIBLE_DEVICES chooses the GPUs. Every case is written as it ends, to
OUT_DIR/<stage>.json and .log. The last line is one JSON document with all results.

``--stages best``, and ``best_rest`` in further calls, time Troupe beside peers at their best settings on four GPUs.
Runs on fewer GPUs are timed at the same time there, and their results say ``runs_beside``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.denoise_step.stage import Run, Stage, joined
from benchmarks.denoise_step.stages import NAMED, STAGES, stages_named
from benchmarks.turns import Meeting

ROOT = Path(__file__).parents[2]
SMALLEST_LIMIT_S = 15
STOP_S = 35
"""More than the 30 s that a launcher gives its ranks before it kills them."""
READY_SHARE = 0.7
"""Share of a stage's time after which gangs that are not ready are stopped, so that the others are timed."""
TAIL_LINES, FEW_LINES, ERROR_LINES = 30, 8, 8
"""Lines printed of a run that fails, of one that ends well, and of one case's error."""
LINE, ERROR_SAID = 200, 600
"""Characters printed of a line, and kept of an error."""
OF_PROCESS = ("hardware", "torch", "python_s")
"""Facts of a run that hold for all its results."""
POLL_S = 0.2
TRIALS = re.compile(
    r"\{|AUTOTUNE |Autotune |strides: |dtypes: |SingleProcess AUTOTUNE |\s+\S+ [\d.]+ ms [\d.]+%"
    r"|(INFO|WARNING) \d\d-\d\d "
)
"""Beginnings of lines that are not printed: kernels that a compiler tried, results, and vLLM's own log."""


@dataclass(slots=True)
class Started:
    """A run's process. ``turn`` is its place among those that were started with it."""

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
    stages = stages_named(arguments.stages) or list(STAGES)
    stages = [joined(stages)] if arguments.together else stages
    print(plan_of(stages), flush=True)
    for stage in stages:
        left_s = int(end_s - time.monotonic())
        if num_gpus < stage.min_gpus or left_s < SMALLEST_LIMIT_S:
            outcome[stage.name] = f"skipped: {num_gpus} GPUs, {left_s} s left"
            continue
        print(f"## {stage.name}, {time.monotonic() - start_s:.0f} s after the start", flush=True)
        outcome |= perform(stage, num_gpus, min(stage.limit_s, left_s), arguments.out)
        summary = {"stages": outcome, "results": collect(arguments.out)}
        (arguments.out / "all.json").write_text(json.dumps(summary))
    print(json.dumps({"stages": outcome, "results": collect(arguments.out)}), flush=True)


def plan_of(stages: Sequence[Stage]) -> str:
    """Return what the stages are likely to take, one after the other."""
    each = ", ".join(f"{stage.name} {stage.estimate_s}" for stage in stages)
    return f"plan: {sum(stage.estimate_s for stage in stages)} s ({each})"


def perform(stage: Stage, num_gpus: int, limit_s: int, out: Path) -> dict[str, str]:
    """Return for each run "exit ... after ...", or that it was stopped. Print the end of each output."""
    start_s = time.monotonic()
    meeting = out / f"meeting-{stage.name}"
    shutil.rmtree(meeting, ignore_errors=True)  # an earlier call's: nobody would wait for anybody
    started = [start(run, turn, stage, num_gpus, out, meeting) for turn, run in enumerate(stage.runs)]
    meetings = [Meeting(folder=meeting, size=len(started), turn=each.turn) for each in started]
    waiting, outcome = list(started), {}
    while waiting and (passed_s := time.monotonic() - start_s) < limit_s:
        for each in list(waiting):
            if each.process.poll() is not None:
                outcome[each.run.name] = f"exit {each.process.returncode} after {passed_s:.0f} s"
            elif stage.takes_turns and passed_s > READY_SHARE * limit_s and not meetings[each.turn].was_ready():
                stop(each.process)
                outcome[each.run.name] = f"not ready, stopped after {passed_s:.0f} s"
            else:
                continue
            waiting.remove(each)
            meetings[each.turn].leave()
        time.sleep(POLL_S)
    for each in waiting:
        stop(each.process)
        outcome[each.run.name] = f"stopped after {time.monotonic() - start_s:.0f} s"
    for each in started:
        print(f"== {each.run.name}: {outcome[each.run.name]}", *ending(each, out), sep="\n", flush=True)
    return outcome


def ending(ended: Started, out: Path) -> list[str]:
    """Return the last lines of a run's output, and of each error that it reports."""
    lines = [line for line in ended.log.read_text(errors="replace").splitlines() if is_news(line)]
    lines = lines[-(FEW_LINES if ended.process.returncode == 0 else TAIL_LINES) :]
    for result in results_in(out / f"{ended.run.name}.json"):
        if error := result.get("error"):
            lines += [f"{result.get('case')} FAILED:", *error.splitlines()[-ERROR_LINES:]]
    return [line[:LINE] for line in lines]


def start(run: Run, turn: int, stage: Stage, num_gpus: int, out: Path, meeting: Path) -> Started:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "4"}
    if run.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible(run.gpus))
    if len(stage.runs) > 1:
        ranks = sum(max(1, len(each.gpus)) for each in stage.runs)  # that compile at one time
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(4, (os.cpu_count() or 1) // ranks))
    if stage.takes_turns:
        meeting.mkdir(exist_ok=True)
    log = out / f"{run.name}.log"
    (out / f"{run.name}.json").unlink(missing_ok=True)  # an earlier call's: it would pass for this run's
    command = command_of(run, num_gpus, out)
    if stage.takes_turns:
        command += ["--meet", str(meeting), "--turn", str(len(stage.runs)), str(turn)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, process_group=0
        )  # stopped with all that it started
    return Started(run=run, turn=turn, process=process, log=log)


def visible(gpus: Sequence[int]) -> Iterator[str]:
    """Yield the names of ``gpus``, which are counted among those that this process sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (seen.split(",")[gpu] if seen else str(gpu) for gpu in gpus)


def command_of(run: Run, num_gpus: int, out: Path) -> list[str]:
    ranks = len(run.gpus) or num_gpus
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    written = ["--out", str(out / f"{run.name}.json")] if run.writes_json else []
    return [sys.executable, *launcher, "-m", run.module, *written, *run.arguments]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a launcher to stop its ranks, then kill what is left: it would hold its GPU."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def is_news(line: str) -> bool:
    noise = ("Attention backends are", "OMP_NUM_THREADS", "****", "_warn_once", "UserWarning: Warning: Profiler")
    return bool(line.strip()) and not TRIALS.match(line) and not any(part in line for part in noise)


def collect(out: Path) -> list[dict[str, Any]]:
    """Return all results with what their runs say of themselves, and how many ran on other GPUs at the same time."""
    beside = {run.name: len(stage.runs) - 1 for stage in STAGES if not stage.takes_turns for run in stage.runs}
    found: list[dict[str, Any]] = []
    for path in sorted({*out.glob("*.json")} - {out / "all.json"}):
        for result in results_in(path):
            error = {"error": result["error"].replace(f"{ROOT}/", "")[-ERROR_SAID:]} if "error" in result else {}
            others = {"runs_beside": beside[path.stem]} if beside.get(path.stem) else {}
            found.append({"stage": path.stem, **result, **others, **error})
    return found


def results_in(path: Path) -> list[dict[str, Any]]:
    """Return what a run has written: nothing if it wrote nothing, or was stopped as it wrote."""
    try:
        document = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    facts = {name: document[name] for name in OF_PROCESS if name in document}
    return [{**facts, **result} for result in document.get("results", [document])]


def count_gpus() -> int:
    """Ask a process that ends, so that this one holds no device."""
    code = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stages", nargs="+", default=(), choices=NAMED, metavar="STAGE", help="all by default")
    parser.add_argument("--together", action="store_true", help="the stages prepare at one time and take turns")
    parser.add_argument("--limit-s", type=int, default=560)
    arguments = parser.parse_args()
    if arguments.together and not arguments.stages:
        parser.error("--together is for stages that are named: give --stages")
    return arguments


if __name__ == "__main__":
    main()
