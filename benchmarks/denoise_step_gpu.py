"""Everything about the denoising step that a GPU host can tell, in one call: right first, then fast, then the peers.

    python -m benchmarks.denoise_step_gpu OUT_DIR [--limit-s 560] [--stages NAME ...]

Stages run in the order of ``STAGES``, each a process (or one a GPU) of its own with a limit, so that one that fails or
hangs costs no other; a stage that the time left does not allow is passed over and named. Every case is written as it
ends: OUT_DIR/<stage>.json and .log. The last line is one JSON document with all results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALLEST_LIMIT_S = 20
STOP_S = 35
"""A launcher gives its ranks 30 s before it kills them."""
TAIL_LINES = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """``module`` with ``arguments``, on all GPUs or on one, stopped after ``limit_s``."""

    name: str
    module: str
    arguments: tuple[str, ...]
    limit_s: int
    all_gpus: bool = True
    min_gpus: int = 1


STEP = "benchmarks.denoise_step"
PARTS = "benchmarks.denoise_step_parts"
KERNEL_CHECK = "tests.engines.torch_engine.triton_check"
VARIANTS = ("lane", "parts", "nccl-", "one-stream", "none", "--skip", "peer")

STAGES = (
    Stage(name="kernels", module=KERNEL_CHECK, arguments=("cuda",), limit_s=60, all_gpus=False),
    Stage(name="parts", module=PARTS, arguments=(), limit_s=90, all_gpus=False),
    Stage(name="goals", module=STEP, arguments=(), limit_s=90),
    Stage(name="variants", module=STEP, arguments=VARIANTS, limit_s=120),
    Stage(name="peer_memory", module=STEP, arguments=("/peer",), limit_s=60, min_gpus=2),
    Stage(name="strategies", module=STEP, arguments=("allgather_kv", "/ring", "hybrid"), limit_s=60, min_gpus=2),
    Stage(name="engine", module=STEP, arguments=("engine/", "switch/"), limit_s=60),
    Stage(name="diffusers_ulysses", module=STEP, arguments=("diffusers-ulysses",), limit_s=90, min_gpus=2),
    Stage(name="diffusers_ring", module=STEP, arguments=("diffusers-ring",), limit_s=90, min_gpus=2),
    Stage(name="xdit", module=STEP, arguments=("xdit",), limit_s=90, min_gpus=2),
    Stage(name="module", module=STEP, arguments=("eager/", "blocks/", "fast/2048/w1"), limit_s=90, all_gpus=False),
    Stage(
        name="profile",
        module="benchmarks.step_profile",
        arguments=("fast/1024/w1/bf16", "fast/1024/w1/fp8", "fast/1024/w4/bf16/ulysses/none"),
        limit_s=90,
        all_gpus=False,
    ),
    Stage(name="wan", module=STEP, arguments=("wan/",), limit_s=240),
)  # fmt: skip


def main() -> None:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + arguments.limit_s
    num_gpus = count_gpus()
    outcome: dict[str, str] = {}
    for stage in STAGES:
        if arguments.stages and stage.name not in arguments.stages:
            continue
        left_s = int(end_s - time.monotonic())
        if num_gpus < stage.min_gpus or left_s < SMALLEST_LIMIT_S:
            outcome[stage.name] = f"passed over: {num_gpus} GPUs, {left_s} s left"
            continue
        outcome[stage.name] = run(stage, num_gpus, min(stage.limit_s, left_s), arguments.out)
    print(json.dumps({"stages": outcome, "results": collect(arguments.out)}), flush=True)


def run(stage: Stage, num_gpus: int, limit_s: int, out: Path) -> str:
    """ "done in ...", or what went wrong. Prints the end of the stage's output."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    start_s = time.monotonic()
    log = out / f"{stage.name}.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command_of(stage, num_gpus, out), stdout=stream, stderr=subprocess.STDOUT, env=environment
        )
        code = wait_or_stop(process, limit_s)
    lines = [line[:200] for line in log.read_text(errors="replace").splitlines() if not line.startswith("{")]
    print(f"== {stage.name}", *lines[-TAIL_LINES:], sep="\n", flush=True)
    took = f"{time.monotonic() - start_s:.0f} s"
    return f"stopped after {took}" if code is None else f"exit {code} after {took}"


def command_of(stage: Stage, num_gpus: int, out: Path) -> list[str]:
    several = stage.all_gpus and num_gpus > 1
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={num_gpus}"] if several else []
    written = ["--out", str(out / f"{stage.name}.json")] if stage.module in (STEP, PARTS) else []
    return [sys.executable, *launcher, "-m", stage.module, *written, *stage.arguments]


def wait_or_stop(process: subprocess.Popen[bytes], limit_s: int) -> int | None:
    """The exit status; None if it had to be stopped. A launcher that is asked to stop stops its ranks."""
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
    return None


def collect(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted(out.glob("*.json")):
        found.extend({"stage": path.stem, **result} for result in json.loads(path.read_text())["results"])
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
    parser.add_argument(
        "--stages", nargs="+", default=(), help=f"of {', '.join(stage.name for stage in STAGES)}; all by default"
    )
    parser.add_argument("--limit-s", type=int, default=560)
    return parser.parse_args(namespace=Arguments())


if __name__ == "__main__":
    main()
